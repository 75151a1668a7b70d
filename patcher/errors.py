"""The ways in which this program fails, and the exit code of each.

Every expected failure is one of these: what went wrong, where, and what to do
next. They are turned into text and an exit code in one place, ``cli.main``.
"""

from __future__ import annotations

import copy
import platform
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final, Self

from patcher import __version__


class DdtreePatchError(Exception):
    """An expected failure.

    what: one sentence that names the failure.
    where: the host, file or command that it concerns.
    next_step: what the operator can do about it.
    detail: more lines for those who want them (a log's end, a diff).
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", next_step: str = "", detail: str = "") -> None:
        super().__init__(what)
        self.what: Final = what
        self.where: Final = where
        self.next_step: Final = next_step
        self.detail: Final = detail

    @property
    def kind(self) -> str:
        """The name of what failed, for reports."""
        return type(self).__name__

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what

    def but(self, **texts: str) -> Self:
        """The same failure with other texts (`what`, `next_step` ...). An error that was raised is never changed."""
        other = copy.copy(self)
        other.__dict__.update(texts)
        return other

    def as_dict(self) -> dict[str, Any]:
        """The failure as plain data, for ``--json``."""
        return {
            "error": self.kind,
            "what": self.what,
            "where": self.where,
            "next": self.next_step,
            "detail": self.detail,
            "exit_code": self.exit_code,
        }


class UsageProblem(DdtreePatchError):
    """The command line or a settings file asks for something that makes no sense."""

    exit_code = 2


class HostUnreachable(DdtreePatchError):
    """No connection to the host, or it broke."""

    exit_code = 3


class HostKeyProblem(HostUnreachable):
    """The host's key is unknown, changed or revoked."""


class AuthenticationProblem(HostUnreachable):
    """The host, or sudo on it, does not let us in."""


class BadAnswer(HostUnreachable):
    """The host answers, but not as this tool's own program there does."""


class Conflict(DdtreePatchError):
    """What is installed and what the series expects do not go together. Nothing was written."""

    exit_code = 4


class UnsupportedVersion(Conflict):
    """No series is made for the installed version."""


class Drift(Conflict):
    """An installed file is neither pristine nor in a state that the series knows."""


class SeriesProblem(Conflict):
    """A patch or a series.toml is corrupt or contradicts itself."""


class PortConflict(Conflict):
    """A patch does not merge into another release by itself. The work tree is as git leaves it; nothing is exported."""


class NoInstallation(Conflict):
    """The package, its interpreter or its directory is not where it was looked for."""


class KernelProblem(DdtreePatchError):
    """The sampling kernel is missing, does not load, or gives a wrong result."""

    exit_code = 5


class NotReady(DdtreePatchError):
    """The service did not come back in time; the old state was put back."""

    exit_code = 6


class SmokeFailed(DdtreePatchError):
    """The smoke suite failed; the old state was put back."""

    exit_code = 7


class RollbackFailed(DdtreePatchError):
    """The old state could not be put back. ``commands`` are what an operator must run by hand.

    ``last_resort`` is the end of them, which is for the host itself, and only when those before it fail.
    """

    exit_code = 8

    def __init__(
        self,
        what: str,
        *,
        commands: Sequence[str] = (),
        last_resort: Sequence[str] = (),
        where: str = "",
        next_step: str = "",
        detail: str = "",
    ) -> None:
        super().__init__(what, where=where, next_step=next_step, detail=detail)
        self.last_resort = list(last_resort)
        self.commands = [*commands, *last_resort]

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "commands": self.commands, "last_resort": self.last_resort}


class RolledBack(DdtreePatchError):
    """What ``cause`` broke was put back: ``now`` says how things stand. Exit code and kind are those of the cause."""

    def __init__(self, cause: DdtreePatchError, now: str) -> None:
        super().__init__(
            cause.what,
            where=cause.where,
            next_step=f"{now}; {cause.next_step}" if cause.next_step else now,
            detail=cause.detail,
        )
        self.cause = cause
        self.now = now
        self.exit_code = cause.exit_code

    @property
    def kind(self) -> str:
        return self.cause.kind


class Locked(DdtreePatchError):
    """Someone else is changing this installation."""

    exit_code = 9


class MixedOutcome(DdtreePatchError):
    """Several hosts, and they did not all end the same way."""

    exit_code = 10


class NotTouched(MixedOutcome):
    """This host was left as it was, because of another one."""


class Interrupted(DdtreePatchError):
    """The operator stopped the command. The hosts are consistent."""

    exit_code = 130


def unexpected(error: Exception, where: str) -> DdtreePatchError:
    """A bug of this tool as an error that can be pasted into a report."""
    log = "".join(traceback.format_exception(error))
    system = f"ddtree-patch {__version__}, Python {platform.python_version()}, {platform.platform()}"
    return DdtreePatchError(
        f"unexpected {type(error).__name__}: {error}",
        where=where,
        next_step="this is a bug of ddtree-patch: report it with the lines below",
        detail=f"{system}\nargv: {sys.argv[1:]}\n{log}",
    )
