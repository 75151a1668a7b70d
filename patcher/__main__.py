"""The entry of the program, and of `python -m patcher`: light, so that Ctrl-C is told even while Python still loads."""

import sys

from patcher import interrupts


def run() -> int:
    interrupts.install()
    try:
        from patcher.cli import main

        return main()
    except KeyboardInterrupt:  # before the command line could see to it: nothing was begun
        interrupts.ignore()
        from patcher.cli import stopped

        return stopped(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
