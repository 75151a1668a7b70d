"""A server that the operator's own commands restart, stop and start. Its process is the one that serves the port."""

from __future__ import annotations

import time
from collections.abc import Sequence

from patcher.errors import UsageProblem
from patcher.server.services.base import COMMAND_TIMEOUT_S, LOG_LIMIT, Service
from patcher.ssh.connection import Completed


class CommandService(Service):
    kind = "command"

    def restart(self, *, patched: bool = True) -> None:
        self._run(self.settings.restart)

    def stop(self) -> None:
        self._run(self._command("stop"))

    def start(self, *, patched: bool = True) -> None:
        self._run(self._command("start"))

    @property
    def starts_stopped(self) -> bool:
        return bool(self.settings.stop)

    def main_pid(self) -> int | None:
        return self.host.serving_pid()

    def by_hand(self) -> list[str]:
        return [self.typed(self.settings.restart)]

    def own_log_at(self) -> str:
        return "not known here; service.log in hosts.toml can name it"

    def failure(self) -> str | None:
        return None  # nothing but the server itself can be asked

    def _run(self, argv: Sequence[str]) -> None:
        log = f"{self.host.state_dir}/logs/command-{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**6:06}.log"
        rc = self.host.script("run", argv=list(argv), log=log, timeout=COMMAND_TIMEOUT_S)["rc"]
        if rc != 0:
            said = self.host.script("read_log", path=log, offset=0, limit=LOG_LIMIT)["text"]
            raise self.refused(argv, Completed(rc, said.encode(), b""))

    def _command(self, name: str) -> tuple[str, ...]:
        argv = getattr(self.settings, name)
        if not argv:
            raise UsageProblem(
                f"service.{name} is not set, so the server can only be restarted",
                where=self.host.name,
                next_step=f"set service.{name} to an argv list in hosts.toml",
            )
        return argv
