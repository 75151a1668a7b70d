"""A server that is the main process of a container."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

from patcher.errors import NotReady, UsageProblem
from patcher.server.services.base import Service
from patcher.wire.shapes import COUNT, problem

STOP_S = 60  # from TERM to KILL
_STATE = {"Pid": COUNT, "Status": str, "ExitCode": int, "StartedAt": str}
_CONTAINER = {"State": _STATE}


class DockerService(Service):
    kind = "docker"

    def restart(self, *, patched: bool = True) -> None:
        self.run([*self._tool(), "restart", "-t", str(STOP_S), self.settings.container])

    def stop(self) -> None:
        self.run([*self._tool(), "stop", "-t", str(STOP_S), self.settings.container])

    def start(self, *, patched: bool = True) -> None:
        self.run([*self._tool(), "start", self.settings.container])

    def main_pid(self) -> int | None:
        return int(self._inspect()["State"]["Pid"]) or None

    def by_hand(self) -> list[str]:
        return [self.typed([*self._tool(), "restart", self.settings.container])]

    def failure(self) -> str | None:
        state = self._inspect()["State"]
        if state["Status"] in ("exited", "dead", "removing"):
            memory = ", out of memory" if state.get("OOMKilled") else ""
            return f"container {self.settings.container} is {state['Status']} (exit code {state['ExitCode']}{memory})"
        return None

    def describe(self) -> dict[str, Any]:
        state = self._inspect()["State"]
        return {**super().describe(), "container": self.settings.container, "state": state["Status"]}

    def own_log_marker(self) -> dict[str, Any]:
        now = self.host.script("status", port=self.host.port, pid=0)["now"]
        return {"since": datetime.datetime.fromtimestamp(now, datetime.UTC).isoformat()}

    def own_log(self, marker: Mapping[str, Any]) -> str:
        since = marker.get("since") or self._inspect()["State"]["StartedAt"]
        return self.read([*self._tool(), "logs", "--since", since, self.settings.container])

    def own_log_at(self) -> str:
        return self.typed([*self._tool(), "logs", self.settings.container])

    def _log_path(self) -> str:
        # The container's standard output is a pipe to its runtime; a file that it has open is a path of its own tree.
        return self.settings.log

    def port_in_namespace(self) -> int:
        """The container's port behind the host's, where one is published."""
        published = (self._inspect().get("NetworkSettings") or {}).get("Ports") or {}
        for inner, outer in published.items():
            if any(binding.get("HostPort") == str(self.host.port) for binding in outer or ()):
                return int(inner.partition("/")[0])
        return self.host.port

    def _inspect(self) -> dict[str, Any]:
        argv = [*self._tool(), "inspect", "--type", "container", self.settings.container]
        done = self.run(argv, check=False)
        if done.rc != 0 and b"o such" in done.stderr + done.stdout:
            raise UsageProblem(
                f"there is no container {self.settings.container}",
                where=self.host.name,
                next_step="correct service.container in hosts.toml; `docker ps --all` lists the containers",
            )
        if done.rc != 0:
            raise self.refused(argv, done)
        try:
            containers = json.loads(done.stdout)
            wrong = problem(containers, [_CONTAINER])
            if wrong or not containers:
                raise ValueError(wrong)
            return containers[0]
        except (ValueError, RecursionError) as error:
            raise NotReady(
                "`docker inspect` did not print a container",
                where=self.host.name,
                next_step="try it by hand",
                detail=done.stdout.decode("utf-8", "replace")[:2000],
            ) from error

    def _tool(self) -> list[str]:
        return list(self.settings.control) or ["docker"]
