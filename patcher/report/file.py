"""The file that keeps a command's result: up to date while the command works, and never half written."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from patcher.errors import UsageProblem
from patcher.report.outcome import Outcome

_ELSEWHERE = "give a path in a directory that exists and can be written"


class ReportFile:
    """A file that has the last outcome it was given, as a whole, whenever this program ends.

    A device, a pipe, or what this program's own output goes to takes one document, at the end. `failure` says why the
    last outcome is not in it: hosts are not left half done for a report.
    """

    def __init__(self, path: Path, form: Callable[[Outcome], bytes]) -> None:
        """form: the outcome as the file's bytes. Raises UsageProblem for a path that cannot be written."""
        self.path, self.form = path, form
        self.failure: UsageProblem | None = None
        self._output = _own_output(path)
        self._final = Path(os.path.realpath(path))  # a link stays one
        self._beside = self._final.with_name(f".{self._final.name}.{os.getpid()}")
        try:
            if path.is_dir():
                raise UsageProblem("the report is a directory", where=str(path), next_step=_ELSEWHERE)
            self._is_stream = self._output is not None or (path.exists() and not path.is_file())
            if not self._is_stream and not self._final.parent.is_dir():
                raise UsageProblem("the report's directory does not exist", where=str(path), next_step=_ELSEWHERE)
            if not self._is_stream:
                self._beside.touch()
                self._beside.unlink()
        except OSError as error:
            raise self._cannot(error) from error

    def keep(self, outcome: Outcome) -> None:
        """Write what is not the end yet, where a later one takes its place."""
        if not self._is_stream:
            self.write(outcome)

    def write(self, outcome: Outcome) -> None:
        try:
            self._put(self.form(outcome))
            self.failure = None
        except OSError as error:
            self.failure = self._cannot(error)

    def _cannot(self, error: OSError) -> UsageProblem:
        return UsageProblem(f"cannot write the report: {error.strerror}", where=str(self.path), next_step=_ELSEWHERE)

    def _put(self, data: bytes) -> None:
        if self._is_stream:
            # By the descriptor itself: opened anew, a file would be written from its start, and by the result again.
            with open(self.path if self._output is None else os.dup(self._output), "wb") as stream:
                stream.write(data)
            return
        try:
            with open(self._beside, "wb") as file:
                with contextlib.suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), stat.S_IMODE(self._final.stat().st_mode))
                file.write(data)
            self._beside.replace(self._final)
        finally:
            self._beside.unlink(missing_ok=True)


def _own_output(path: Path) -> int | None:
    """The descriptor of stdout or stderr where the path leads to the same, as /dev/stdout does."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed, or no such file
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
    return None
