"""The entry of the program, and of `python -m patcher`: light, so that Ctrl-C is told even while Python still loads."""

import signal
import sys
import time

# timeout(1) signals its child and then the group of it, a closed terminal is told by the kernel and by the shell.
SAME_S = 0.5
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run() -> int:
    last = -SAME_S

    def interrupt(number: int, frame: object) -> None:
        """What Ctrl-C does, once for signals that come together."""
        nonlocal last
        before, last = last, time.monotonic()
        if last - before >= SAME_S:
            raise KeyboardInterrupt

    # A supervisor that ends this program, or a terminal that is closed, stops it as Ctrl-C does, unless that was ruled
    # out (nohup).
    for number in STOPS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)
    try:
        from patcher.cli import main

        return main()
    except KeyboardInterrupt:  # before the command line could see to it: nothing was begun
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        from patcher.cli import stopped

        return stopped(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
