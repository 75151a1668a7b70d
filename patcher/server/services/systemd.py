"""A server that is a systemd unit, of the system or of a user."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from patcher.errors import NotReady, UsageProblem
from patcher.server.services.base import Service
from patcher.ssh.connection import Completed

PROPERTIES = "LoadState,ActiveState,SubState,MainPID,Result,ExecMainStatus,NRestarts"
JOURNAL = ("journalctl", "--no-pager", "--quiet")


class SystemdService(Service):
    kind = "systemd"

    def restart(self, *, patched: bool = True) -> None:
        self._start("restart")

    def stop(self) -> None:
        self._show()
        self.run([*self._tool("systemctl"), "stop", self.settings.unit])

    def start(self, *, patched: bool = True) -> None:
        self._start("start")

    def by_hand(self) -> list[str]:
        return [
            self.typed([*self._tool("systemctl"), action, self.settings.unit]) for action in ("reset-failed", "restart")
        ]

    def _start(self, action: str) -> None:
        self._show()
        # The starts of a server that died again and again count against the unit's limit, and so would this one.
        # Where that is not permitted, the start itself says so.
        self.run([*self._tool("systemctl"), "reset-failed", self.settings.unit], check=False)
        self.run([*self._tool("systemctl"), action, self.settings.unit])

    def main_pid(self) -> int | None:
        return int(self._show()["MainPID"]) or None

    def failure(self) -> str | None:
        shown = self._show()
        if shown["ActiveState"] in ("failed", "inactive"):
            return (
                f"{self.settings.unit} is {shown['ActiveState']} ({shown['Result']}, "
                f"exit status {shown['ExecMainStatus']}, restarted {shown['NRestarts']} times)"
            )
        return None

    def describe(self) -> dict[str, Any]:
        shown = self._show()
        return {
            **super().describe(),
            "unit": self.settings.unit,
            "scope": self.settings.scope,
            "state": f"{shown['ActiveState']} ({shown['SubState']})",
        }

    def own_log_marker(self) -> dict[str, Any]:
        # Of the whole journal: a unit that has logged nothing yet has no place in it.
        done = self.run([*JOURNAL, "--lines=0", "--show-cursor"], check=False)
        return {"cursor": done.stdout.decode("utf-8", "replace").rpartition("-- cursor: ")[2].strip()}

    def own_log(self, marker: Mapping[str, Any]) -> str:
        since = [f"--after-cursor={marker['cursor']}"] if marker.get("cursor") else ["--boot"]
        return self.read([*JOURNAL, self._selector, "--output=cat", *since])

    def own_log_at(self) -> str:
        return self.typed(["journalctl", self._selector, "--boot"])

    @property
    def _selector(self) -> str:
        # The user's journal can be read through the system's tool; only the selector of the unit differs.
        return f"{'--user-unit' if self.settings.scope == 'user' else '--unit'}={self.settings.unit}"

    def _tool(self, name: str) -> list[str]:
        if self.settings.scope == "system":
            return [name]
        # A session without PAM has no XDG_RUNTIME_DIR, and without it the user's manager is not found.
        return ["env", f"XDG_RUNTIME_DIR=/run/user/{self._uid}", name, "--user"]

    @functools.cached_property
    def _uid(self) -> str:
        return self.run(["id", "-u"]).stdout.decode().strip()

    def refused(self, argv: Sequence[str], done: Completed) -> NotReady:
        problem = super().refused(argv, done)
        if self.settings.scope == "user" and "to bus" in problem.what:
            return problem.but(
                next_step="log in as the unit's user, without sudo, whose systemd runs while they are logged out: "
                "`sudo loginctl enable-linger USER` on the host"
            )
        return problem

    def _show(self) -> dict[str, str]:
        """The unit's properties. Raises UsageProblem when there is no such unit."""
        argv = [*self._tool("systemctl"), "show", f"--property={PROPERTIES}", self.settings.unit]
        lines = self.run(argv).stdout.decode("utf-8", "replace").split("\n")
        shown = {name: value for name, equals, value in (line.partition("=") for line in lines) if equals}
        if shown.get("LoadState") != "loaded":
            raise UsageProblem(
                f"there is no {self.settings.scope} unit {self.settings.unit} ({shown.get('LoadState', 'no answer')})",
                where=self.host.name,
                next_step="correct service.unit or service.scope in hosts.toml; `systemctl list-units` lists the units",
            )
        if not (set(PROPERTIES.split(",")) <= shown.keys() and shown["MainPID"].isdecimal()):
            raise NotReady(
                "`systemctl show` did not print the unit's properties",
                where=self.host.name,
                next_step="try it by hand",
                detail="\n".join(lines)[:2000],
            )
        return shown
