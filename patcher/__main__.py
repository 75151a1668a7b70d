"""The entry of the program, and of `python -m patcher`: light, so that Ctrl-C is told even while Python still loads."""

import signal
import sys


def run() -> int:
    # A supervisor that ends this program, or a terminal that is closed, stops it as Ctrl-C does, unless that was ruled
    # out (nohup).
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        from patcher.cli import main

        return main()
    except KeyboardInterrupt:  # before the command line could see to it: nothing was begun
        print("error: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
