"""What becomes of the server: decided once, shown by a dry run, and executed as it stands."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

NO_SERVER = "no server is running"
KERNEL, IMPORTS, SMOKE = "kernel probe", "import check", "smoke suite"
RESTART = "restart"


@dataclass(frozen=True)
class LeftOut:
    """Something that a reader may expect of a command, and why it is not done."""

    name: str
    why: str


@dataclass(frozen=True)
class ServerFound:
    """The server of one host as it was found.

    Attributes:
        process: its id and start tick; None when none runs.
        line: the command line to put back if a restart fails, of a server that runs or is missing; never shown.
        why_not: why the server can not be restarted; empty when it can.
        need: why it has to be; empty when it runs what it should.
    """

    process: tuple[int, int] | None = None
    line: tuple[str, ...] | None = field(default=None, repr=False)
    why_not: str = ""
    need: str = ""


@dataclass(frozen=True)
class ServerAction:
    """What happens to the server of one host.

    Attributes:
        kind: what is done with it.
        why: why that is done, or why the server is left as it is.
        before: id and start tick of the process that was found; None when none ran.
        flags: what service.args change on its command line, without secrets.
        checks: what is checked of this command's work, in order.
        left_out: what is not, and why.
        line: as in ServerFound.
    """

    kind: Literal["none", "start", "restart"]
    why: str
    before: tuple[int, int] | None = None
    flags: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    line: tuple[str, ...] | None = field(default=None, repr=False)

    @property
    def acts(self) -> bool:
        return self.kind != "none"

    @property
    def is_blocked(self) -> bool:
        """Whether the server can not be restarted, needed or not."""
        return any(left.name == RESTART for left in self.left_out)

    def followed_by(self, checks: Sequence[str], left_out: Sequence[LeftOut]) -> ServerAction:
        """The same, with what is checked and what is not."""
        return replace(self, checks=tuple(checks), left_out=(*self.left_out, *left_out))

    def as_dict(self) -> dict[str, Any]:
        told = asdict(self)
        del told["line"]
        return {**told, "before": self.before and {"pid": self.before[0], "ticks": self.before[1]}}

    def __str__(self) -> str:
        """For a reader who asks what a command would do."""
        if not self.acts:
            return NO_SERVER if self.why == NO_SERVER else f"no restart: {self.why}"
        what = f"process {self.before[0]} would be restarted" if self.before else "the server would be started"
        with_flags = f" with {shlex.join(self.flags)}" if self.flags else ""
        return f"{what}{with_flags}, because {self.why}"


def decide(found: Sequence[ServerFound], flags: Sequence[Sequence[str]], settled: str = "") -> list[ServerAction]:
    """What happens to the server of each host of a unit: it is restarted on all of them, or on none.

    `flags`: of each host; `settled`: what is said of a server that needs no restart.
    """
    blocked = next((one.why_not for one in found if one.why_not), "")
    if blocked:
        return [_blocked(one.why_not or _of_another(blocked)) for one in found]
    if not any(one.need for one in found):
        return [ServerAction("none", settled, one.process) for one in found]
    return [
        ServerAction(
            "restart" if one.process else "start",
            one.need or "another node of the server needs it",
            one.process,
            tuple(own),
            line=one.line,
        )
        for one, own in zip(found, flags, strict=True)
    ]


def _blocked(why: str) -> ServerAction:
    return ServerAction("none", why, left_out=(LeftOut(RESTART, why),))


def _of_another(why: str) -> str:
    return why if why == NO_SERVER else "another node of the server is not restarted"
