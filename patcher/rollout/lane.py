"""One host of a command: reached, left alone, or interrupted."""

from __future__ import annotations

from dataclasses import replace

from patcher.errors import Interrupted, NotTouched
from patcher.hosts import HostSettings
from patcher.report.outcome import HostResult
from patcher.ssh.connection import Connection, connect


class Lane:
    """One host: its settings, result, and connection once there is one."""

    def __init__(self, host: HostSettings, result: HostResult) -> None:
        self.host, self.result = host, result
        self.connection: Connection | None = None
        self.prepared = self.begun = self.ended = False

    def connect(self) -> None:
        if not self.host.local:
            self.result.tell("connect")
            self.result.doing = "connect"
        self.connection = connect(self.host)
        self.result.doing = ""

    @property
    def reached(self) -> Connection:
        """The connection, which there is once `connect` is done."""
        assert self.connection is not None
        return self.connection

    def leave(self, why: str) -> None:
        """Not to be touched; a host with an error of its own keeps that."""
        if self.result.error is None:
            self.result.summary = "not touched"
            self.result.error = NotTouched(
                f"not touched, because {why}",
                where=self.result.host,
                next_step="solve that first, leave that host out, or give --keep-going",
            )

    def so_far(self) -> HostResult:
        """What is known of this host, in a copy that its job, which may go on, does not reach."""
        found = self.result
        known = replace(found, steps=list(found.steps), not_done=list(found.not_done), found=dict(found.found))
        if known.error is None and not self.ended:
            waits = self.prepared and not self.begun
            known.error = Interrupted(
                "not begun: nothing was changed here" if waits else f"not ended; last seen at: {found.doing or 'work'}",
                where=found.host,
                next_step="ddtree-patch status says where the host stands",
            )
        return known

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
