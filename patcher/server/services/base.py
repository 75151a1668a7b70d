"""What every restart adapter offers: where the server's process is, how to restart it, and what it logged.

Times are the host's own clock. A process is always found anew on the host, never remembered by its id alone.
"""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from patcher.errors import AuthenticationProblem, NotReady, UsageProblem
from patcher.hosts import ServiceSettings
from patcher.installation.command_line import apply_flags, port_of
from patcher.installation.find import describe_process, redacted, without_secrets
from patcher.ssh.connection import Completed, Connection
from patcher.typed import typed
from patcher.wire.answers import answer_of
from patcher.wire.types import Process, Processes

HOST_SCRIPT = Path(__file__).parents[2] / "agent" / "server.py"
COMMAND_TIMEOUT_S = 600.0
LOG_LIMIT = 8 << 20  # bytes of log that are fetched at most: the last ones
LAST_LINES = 30
UNREADABLE = "[the log cannot be read: "  # begins what log_since gives instead of a log
# How exactly a process's start is known: its tick is 1/100 s, and the clock is adjusted by as much meanwhile.
CLOCK_SLACK_S = 0.05


@dataclass(frozen=True)
class ServiceHost:
    """The host as an adapter sees it.

    `ask` is one agent operation on the installation (Target.ask); `state_dir` is the installation's state directory on
    the host; `port` is where the server answers; `venv_named` is False where the venv was found out by a process.
    """

    name: str
    connection: Connection
    ask: Callable[..., dict[str, Any]]
    state_dir: str
    port: int
    venv_named: bool = True

    def script(self, op: str, *, timeout: float = 60.0, **request: Any) -> dict[str, Any]:
        """One operation of agent/server.py on the host; raises NotReady, BadAnswer, or AuthenticationProblem."""
        reply = self.ask(
            "run_python",
            source=HOST_SCRIPT.read_text(encoding="utf-8"),
            argv=[json.dumps({"op": op, **request})],
            env={},
            timeout=timeout,
        )
        if reply["rc"] != 0:
            raise NotReady(
                f"looking after the server's processes failed ({op})",
                where=self.name,
                next_step="report this with the lines below",
                detail=reply["stderr"][-4000:],
            )
        answer = answer_of(op, reply["stdout"], self.name)
        if answer.get("permission"):
            raise AuthenticationProblem(
                f"the server belongs to another account: {answer['error']}",
                where=self.name,
                next_step="connect as that account, or set sudo = true for this host",
            )
        if "error" in answer:
            raise NotReady(answer["error"], where=self.name, next_step="see to that process by hand, then run again")
        return answer

    def serving_pid(self) -> int | None:
        """The SGLang launcher that serves the port, else the youngest that was told it; for unsupervised servers."""
        processes = self.processes()
        serving = [p for p in processes if self.port in p.listening]
        told = [p for p in processes if port_of(p.argv) == self.port]
        youngest = max(serving or told, key=lambda process: process.start_time, default=None)
        return youngest.pid if youngest else None

    def processes(self) -> tuple[Process, ...]:
        """The SGLang launchers on the host."""
        return typed(self.ask("processes"), Processes).processes


class Service(ABC):
    """One server and the program that keeps it running."""

    kind: ClassVar[str]

    def __init__(self, settings: ServiceSettings, host: ServiceHost) -> None:
        self.settings = settings
        self.host = host
        self._seen: dict[str, Any] = {}  # the server when it was last looked at; on a slow link each look counts

    # ---- what each adapter says -----------------------------------------------------------------------------

    @abstractmethod
    def restart(self, *, patched: bool = True) -> None:
        """End the server and start it again, with the settings' flags when `patched`, else as it was before them.

        Returns as soon as the new one was started; see readiness.wait_ready. Raises NotReady when that is refused.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the server; returns when it is gone."""

    @abstractmethod
    def start(self, *, patched: bool = True) -> None:
        """Start the server, which does not run."""

    @abstractmethod
    def main_pid(self) -> int | None:
        """The server's process as its supervisor knows it; None when there is none."""

    @abstractmethod
    def failure(self) -> str | None:
        """Why the server will not come up by itself, in a few words; None while it may."""

    @abstractmethod
    def by_hand(self) -> list[str]:
        """What an operator types on the host to start the server as it was before this tool restarted it."""

    def start_as(self, argv: Sequence[str]) -> None:
        """From now on start with exactly this command line, where the adapter makes it (else the definition holds)."""
        return None

    def remember(self) -> None:
        """Keep what it takes to start the running server again, before anything ends it."""
        return None

    def ended(self) -> Sequence[str] | None:
        """The command line of a server that this tool ended, while no other was ready in its place; else None.

        Only where nothing but this tool would start it again.
        """
        return None

    def settled(self) -> None:
        """A server is ready: none that was ended is missing any more, unless another command is about to restart it."""
        return None

    def let_go(self) -> None:
        """This command will not start the server that it ended: the next one need not wait for it."""
        return None

    def refuse_in_hand(self) -> None:
        """Raise Locked while another command has stopped the server and may be about to start it."""
        return None

    def line_for(self, server: Mapping[str, Any]) -> list[str]:
        """The command line that this server would have, patched, with the settings' flags of now."""
        return apply_flags(server["argv"], self.settings.args)

    def log_at(self) -> str:
        """Where an operator reads the server's log on the host: a file, or a command; empty when that is not known."""
        return self._log_path() or self.own_log_at()

    def own_log_at(self) -> str:
        """The command that shows the supervisor's log."""
        return ""

    def own_log_marker(self) -> dict[str, Any]:
        """A place in the log of the supervisor, used when the server writes to no file."""
        return {}

    def own_log(self, marker: Mapping[str, Any]) -> str:
        """The supervisor's log from a marker on; from the server's start on for an empty one."""
        return ""

    def port_in_namespace(self) -> int:
        """The port as the server's own network namespace has it."""
        return self.host.port

    @property
    def starts_stopped(self) -> bool:
        """Whether a server that does not run is started by `apply`: one that can be stopped again is."""
        return True

    # ---- the same for all -----------------------------------------------------------------------------------

    def live(self) -> dict[str, Any] | None:
        """The running server: {"pid", "ticks", "start_time", "argv", "cwd", "log", "tree", "listener"}, or None.

        `listener` is {"owner", "process"}: `server` when a process of the tree holds the port, `other` (then `process`
        describes it), `unseen` when that may not be looked at, `none` when nobody listens.
        """
        reply = self.observe()
        if reply["server"] is None:
            return None
        self._seen = {**reply["server"], "listener": reply["listener"]}
        return self._seen

    def observe(self) -> dict[str, Any]:
        """{"now": the host's clock, "server": process or None, "listener": who holds the port}."""
        # Without a process of the supervisor's (pid 0 is nobody), what listens is somebody else's.
        return self.host.script("status", port=self.port_in_namespace(), pid=self.main_pid() or 0)

    def started_since(self, when: float) -> list[str]:
        """The SGLang servers that were started on the host since then (unix time there), one line each."""
        return [describe_process(process) for process in self.host.processes() if process.start_time >= when]

    def describe(self) -> dict[str, Any]:
        """For `doctor` and `status`: the adapter and the server's process, without secrets."""
        server = self.live()
        described: dict[str, Any] = {"kind": self.kind, "running": server is not None}
        if server is not None:
            described |= {key: server[key] for key in ("pid", "start_time", "cwd", "log")}
            described |= {"argv": redacted(server["argv"]), "listener": server["listener"]["owner"]}
        return described

    def log_marker(self) -> dict[str, Any]:
        """Where the log ends now; for log_since."""
        path = self._log_path()
        if not path:
            return self.own_log_marker()
        return {"path": path, "offset": self.host.script("read_log", path=path, offset=0, limit=0)["size"]}

    def log_since(self, marker: Mapping[str, Any] | None = None) -> str:
        """What was logged after `marker` (all of the current log without one); at most the last 8 MiB.

        Begins with UNREADABLE when there is a log that cannot be read: nothing depends on a log alone.
        """
        marker = marker or {}
        path = self._log_path()
        if not path:
            return self.own_log({} if "path" in marker else marker)
        offset = marker["offset"] if marker.get("path") == path else 0
        reply = self.host.script("read_log", path=path, offset=offset, limit=LOG_LIMIT)
        return reply["text"] if reply["problem"] is None else f"{UNREADABLE}{path}: {reply['problem']}]"

    def last_log(self, marker: Mapping[str, Any] | None = None) -> str:
        """The last lines logged, for an error's detail."""
        try:
            text = self.log_since(marker)
        except (NotReady, UsageProblem) as problem:  # it must not take the place of the error that it is for
            text = f"{UNREADABLE}{problem.what}]"
        return without_secrets("\n".join(text.split("\n")[-LAST_LINES - 1 :]).strip("\n"))

    def _log_path(self) -> str:
        if self.settings.log:
            return self.settings.log
        server = self._seen or self.live()
        return (server or {}).get("log") or ""

    def run(self, argv: Sequence[str], *, check: bool = True, timeout: float = COMMAND_TIMEOUT_S) -> Completed:
        """A command on the host. With `check`, raises NotReady when it fails."""
        done = self.host.connection.run(list(argv), timeout=timeout)
        if check and done.rc != 0:
            raise self.refused(argv, done)
        return done

    def read(self, argv: Sequence[str]) -> str:
        """What a command prints on both streams, as the log; UNREADABLE and why when it fails."""
        done = self.run(argv, check=False)
        text = (done.stdout + done.stderr).decode("utf-8", "replace")
        return text if done.rc == 0 else f"{UNREADABLE}`{shlex.join(argv)}`: {text.strip()[-500:]}]"

    def typed(self, argv: Sequence[str]) -> str:
        """A command as an operator types it, who has the rights that this tool has."""
        return shlex.join(["sudo", *argv] if self.host.connection.sudo else argv)

    def refused(self, argv: Sequence[str], done: Completed) -> NotReady:
        """The error for a command that failed."""
        said = without_secrets((done.stderr or done.stdout).decode("utf-8", "replace").strip())
        return NotReady(
            f"`{' '.join(argv)}` failed with exit code {done.rc}: {said[-500:] or 'it said nothing'}",
            where=self.host.name,
            next_step="make that command work by hand on the host (sudo = true runs it as root)",
            detail=said,
        )
