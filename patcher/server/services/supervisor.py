"""A server that is a program of supervisord."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from patcher.errors import UsageProblem
from patcher.server.services.base import Service

TAIL_BYTES = 1 << 20
MARKER_CHARACTERS = 400
STREAMS = ("stdout", "stderr")
STOPPABLE = ("RUNNING", "STARTING", "BACKOFF")


class SupervisorService(Service):
    kind = "supervisor"

    def restart(self, *, patched: bool = True) -> None:
        # To restart a program that gave up would print an error, although it is started then.
        self._control("restart" if self._state()[0] in STOPPABLE else "start")

    def stop(self) -> None:
        if self._state()[0] in STOPPABLE:
            self._control("stop")

    def start(self, *, patched: bool = True) -> None:
        if self._state()[0] not in ("RUNNING", "STARTING"):
            self._control("start")

    def main_pid(self) -> int | None:
        _, words = self._state()
        found = re.search(r"\bpid (\d{1,9}),", " ".join(words))
        return int(found[1]) if found else None

    def by_hand(self) -> list[str]:
        return [self.typed([*self._tool(), "restart", self.settings.program])]

    def failure(self) -> str | None:
        state, words = self._state()
        if state in ("FATAL", "EXITED", "STOPPED", "BACKOFF"):
            return f"{self.settings.program} is {state}: {' '.join(words)}"
        return None

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "program": self.settings.program, "state": self._state()[0]}

    def own_log_marker(self) -> dict[str, Any]:
        # supervisorctl gives no position in a log: the place is known by what stands before it.
        return {stream: self._tail(stream) for stream in STREAMS}

    def own_log(self, marker: Mapping[str, Any]) -> str:
        logged = ""
        for stream in STREAMS:
            text, before = self._tail(stream), marker.get(stream, "")
            if text.startswith(before):
                logged += text[len(before) :]
            else:  # the log is longer than what is fetched: find where the old end is now
                logged += text.rpartition(before[-MARKER_CHARACTERS:])[2]
        return logged

    def own_log_at(self) -> str:
        return " and ".join(
            self.typed([*self._tool(), "tail", f"-{TAIL_BYTES}", self.settings.program, stream]) for stream in STREAMS
        )

    def _tail(self, stream: str) -> str:
        done = self.run([*self._tool(), "tail", f"-{TAIL_BYTES}", self.settings.program, stream], check=False)
        # With redirect_stderr there is no log of stderr, and supervisorctl says so on stdout.
        text = done.stdout.decode("utf-8", "replace")
        # It ends what it prints with a line end of its own, which is not in the log.
        return "" if text.startswith(f"{self.settings.program}: ERROR") else text.removesuffix("\n")

    def _state(self) -> tuple[str, list[str]]:
        """(RUNNING, STARTING, BACKOFF, STOPPED, EXITED, FATAL; the words after it). Raises UsageProblem, NotReady."""
        argv = [*self._tool(), "status", self.settings.program]
        done = self.run(argv, check=False)  # its exit code is 3 for a program that does not run
        words = done.stdout.decode("utf-8", "replace").split()
        if "(no such process)" in " ".join(words) or "(no such group)" in " ".join(words):
            raise UsageProblem(
                f"supervisord has no program {self.settings.program}",
                where=self.host.name,
                next_step="correct service.program in hosts.toml; `supervisorctl status` lists the programs",
            )
        if len(words) < 2 or not words[1].isupper():
            raise self.refused(argv, done)
        return words[1], words[2:]

    def _control(self, action: str) -> None:
        argv = [*self._tool(), action, self.settings.program]
        done = self.run(argv, check=False)
        # Old releases print an error and still exit 0.
        if done.rc != 0 or b"ERROR" in done.stdout:
            raise self.refused(argv, done)

    def _tool(self) -> list[str]:
        return list(self.settings.control) or ["supervisorctl"]
