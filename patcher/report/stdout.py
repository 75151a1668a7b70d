"""stdout, for the result: all of it is written, or its loss is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from patcher.errors import DdtreePatchError
from patcher.report.render import print_error
from patcher.report.stderr import message_console


def open_closed_streams() -> None:
    """Send a stream that the caller closed (`>&-`) to nowhere, so that writing to it does not fail."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the whole run


def write_result(write: Callable[[], None]) -> bool:
    """Write all of it to stdout. A reader that closed the pipe early (`| head`) is not a failure; a full disk is."""
    try:
        write()
        sys.stdout.flush()
        return True
    except SystemExit:  # rich's answer to a closed pipe
        return True
    except OSError as error:
        # What is left in the buffer must not fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return True
        print_error(
            DdtreePatchError(
                f"the result could not be written: {error.strerror}",
                where="stdout",
                next_step="what was done stands; ddtree-patch status says where",
            ),
            message_console(),
        )
        return False
