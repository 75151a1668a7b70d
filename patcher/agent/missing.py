"""Which servers were stopped and are not back yet, by port: kept in the account's home directory.

A server's venv is found by its process. Of one that was stopped before a command was cut off no process is left, so
where its venv was not named, its interpreter is kept here until a server is ready in its place.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys

from .failures import Refusal
from .files import entries, make_directory, read, remove_empty, unlink, write_state

_PORT = re.compile("[1-9][0-9]{0,4}")


def note(port: int, is_missing: bool) -> None:
    """Keep, or drop, that the server on this port runs from the venv of this very interpreter."""
    with contextlib.suppress(OSError, Refusal):  # an account may have no home; the venv has to be named then
        folder = _folder()
        path = os.path.join(folder, str(port))
        if is_missing:
            with contextlib.suppress(FileExistsError):
                make_directory(folder)
            write_state(path, os.fsencode(sys.executable))
        elif os.path.lexists(path):
            unlink(path)
            remove_empty([folder])


def noted() -> list[dict]:
    """[{"port", "python"}] of the servers that are missing and whose venv still exists."""
    found = []
    with contextlib.suppress(OSError):
        folder = _folder()
        for name in filter(_PORT.fullmatch, entries(folder)):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # gone meanwhile, or another account's
                python = os.fsdecode(read(path) or b"") if stat.S_ISREG(os.lstat(path).st_mode) else ""
                if os.path.isfile(python) and int(name) <= 65535:
                    found.append({"port": int(name), "python": python})
    return found


def _folder() -> str:
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise FileNotFoundError("no home directory")
    return os.path.join(os.path.realpath(home), ".ddtree-patch")
