"""The entry of the program, and of `python -m patcher`: light, so that Ctrl-C is told even while Python still loads."""

import sys


def run() -> int:
    try:
        from patcher.cli import main

        return main()
    except KeyboardInterrupt:  # before the command line could see to it: nothing was begun
        print("error: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
