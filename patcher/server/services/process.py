"""A server that nothing supervises: its own command line is taken from the running process and started again.

The original command line and directory are kept in the agent's state, by the port, its environment in a file of mode
0600 beside it, so that `revert` brings back exactly that server, and a dead one can be started at all. What is about to
be started is kept as `planned` first: a server that has that line is known, whoever started it.

Before a server is ended its command line and port are kept as `ended`, until another is ready in its place: whatever
cuts this tool off in between, the next command knows that a server is missing. Who ended it and when is kept too, so
that no other command starts a server in the pause between the stop and the start.
"""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from patcher.errors import Locked, NotReady
from patcher.hosts import ServiceSettings
from patcher.installation.command_line import apply_flags
from patcher.installation.find import redacted
from patcher.server.services.base import Service, ServiceHost
from patcher.wire.answers import kept_state, last_ended_port

LAST_ENDED = "service"  # {"port"}: of the server that was ended last
GRACE_S = 60.0  # to end after TERM; again after KILL; again for the port
# A command starts a server within this time after it began to stop one, or after it began to start it: a stop takes
# seconds, up to a minute with GPU memory. One that was cut off holds the others up for no longer.
START_WITHIN_S = 120.0


def ended_server(ask: Callable[..., dict[str, Any]], host: str, port: int | None) -> Mapping[str, Any] | None:
    """{"argv", "port", ...} of the server that was ended, while no other was ready in its place; by Target.ask.

    `port` None: of whichever was ended last.
    """
    if port is None:
        port = last_ended_port(ask("state", get=[LAST_ENDED])["values"][LAST_ENDED], host)
    return None if port is None else _kept(ask, host, port).get("ended")


def state_name(port: int) -> str:
    return f"service_{port}"


def _kept(ask: Callable[..., dict[str, Any]], host: str, port: int) -> dict[str, Any]:
    name = state_name(port)
    return kept_state(ask("state", get=[name])["values"][name], host)


class ProcessService(Service):
    kind = "process"

    def __init__(self, settings: ServiceSettings, host: ServiceHost) -> None:
        super().__init__(settings, host)
        self._cached: Mapping[str, Any] | None = None
        self._argv: list[str] | None = None
        self._remembered: tuple[int, int] | None = None
        self._me = uuid.uuid4().hex  # this command, for others

    @property
    def starts_stopped(self) -> bool:
        return False  # how it is started is known from the running process

    def main_pid(self) -> int | None:
        return self.host.serving_pid()

    def observe(self) -> dict[str, Any]:
        for known in (self._seen, self._state().get("running")):
            reply = self._observe_process(known) if known else None
            if reply and reply["server"]:
                return reply
        return super().observe()

    def failure(self) -> str | None:
        running = self._state().get("running")
        if not running or self._observe_process(running)["server"]:
            return None
        return f"process {running['pid']}, which was started last, ended"

    def log_marker(self) -> dict[str, Any]:
        return {}  # what this adapter starts logs to a new file each time

    def _observe_process(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """`observe` of this very process, and of no other that took its id."""
        return self.host.script("status", port=self.host.port, pid=known["pid"], ticks=known["ticks"])

    def restart(self, *, patched: bool = True) -> None:
        self.stop()
        self.start(patched=patched)

    def ended(self) -> list[str] | None:
        ended = self._state().get("ended")
        return ended["argv"] if ended else None

    def settled(self) -> None:
        if self.ended() is None:
            return
        self._cached = None  # another command may have begun to stop the server
        if self.ended() is not None and not self._in_hand():
            self._save({name: value for name, value in self._state().items() if name != "ended"})

    def let_go(self) -> None:
        self._cached = None
        ended = self._state().get("ended")
        if ended and ended["by"] == self._me:
            self._save({**self._state(), "ended": {**ended, "by": ""}})

    def refuse_in_hand(self) -> None:
        in_hand = self._in_hand()
        if in_hand:
            since, now = in_hand
            raise Locked(
                f"a command began to restart the server {now - since:.0f} s ago and may still be at it",
                where=self.host.name,
                next_step=f"run again in {since + START_WITHIN_S - now:.0f} s",
            )

    def _in_hand(self) -> tuple[float, float] | None:
        """(when another command began to stop or start the server, now), while it may not have started it yet."""
        ended = self._ended_by_another()
        if ended is None:
            return None
        seen = self.observe()
        started = seen["server"] is not None and seen["server"]["start_time"] >= ended["since"]
        # A time to come is none of this clock, which was set since.
        if started or not 0 <= seen["now"] - ended["since"] < START_WITHIN_S:
            return None
        return ended["since"], seen["now"]

    def _ended_by_another(self) -> Mapping[str, Any] | None:
        """What is kept of a server that another command ended and has not let go of."""
        ended = self._state().get("ended")
        return ended if ended and ended["by"] not in ("", self._me) else None

    def _ended_now(self, argv: Sequence[str]) -> dict[str, Any]:
        return {"argv": list(argv), "port": self.host.port, "since": self.observe()["now"], "by": self._me}

    def remember(self) -> None:
        server = self.live()
        process = (server["pid"], server["ticks"]) if server else None
        if process and process == self._remembered:
            return  # once: it may be dying by now, with another node of its server
        self._cached = None
        self.refuse_in_hand()
        ended = self.ended()
        if server:
            self._remember(server)
            self._remembered = process
        elif ended is not None:
            self._save({**self._state(), "ended": self._ended_now(ended)})

    def stop(self) -> None:
        self.remember()
        # A dead launcher's schedulers may live on, and hold the port and the GPU's memory.
        ended = self._seen or self._state().get("running")
        if ended is None:
            self.host.script("port_free", port=self.host.port)
            return
        self.host.script(
            "stop", pid=ended["pid"], ticks=ended["ticks"], port=self.host.port, grace=GRACE_S, timeout=6 * GRACE_S
        )

    def start(self, *, patched: bool = True) -> None:
        self._cached = None
        state = self._state()
        if self._ended_by_another():
            raise Locked(
                "another command began to restart the server meanwhile",
                where=self.host.name,
                next_step="ddtree-patch status says where it stands",
            )
        original = state.get("original")
        if original is None:
            raise NotReady(
                "no server runs, and none was ever seen here whose command line could be used",
                where=self.host.name,
                next_step="start the server once by hand, or describe how to start it in hosts.toml (service)",
            )
        argv = self._argv or (apply_flags(original["argv"], self.settings.args) if patched else original["argv"])
        state = {**state, "planned": argv}
        if "ended" in state:
            state["ended"] = self._ended_now(state["ended"]["argv"])
        self._save(state)
        log = f"{self.host.state_dir}/logs/server-{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**6:06}.log"
        started = self.host.script(
            "start",
            argv=argv,
            cwd=original["cwd"],
            uid=original["uid"],
            gid=original["gid"],
            umask=original["umask"],
            env_file=self._env_file(),
            log=log,
        )
        self._save({**state, "running": {**started, "argv": argv}})

    def line_for(self, server: Mapping[str, Any]) -> list[str]:
        original = self._state().get("original") if self._is_known(server) else None
        return apply_flags(original["argv"] if original else server["argv"], self.settings.args)

    def start_as(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)

    def by_hand(self) -> list[str]:
        original = self._state().get("original")
        if original is None:
            return []
        # With the environment that was kept, which is not shown; nor are secrets on the command line.
        server = redacted(original["argv"])
        if self.host.connection.sudo:
            server = ["setpriv", f"--reuid={original['uid']}", f"--regid={original['gid']}", "--init-groups", *server]
        log = shlex.quote(f"{self.host.state_dir}/by-hand.log")
        script = (
            f'cd {shlex.quote(original["cwd"])} && exec env -i "$@" setsid {shlex.join(server)} >{log} 2>&1 </dev/null'
        )
        command = ["xargs", "-0", "-a", self._env_file(), "sh", "-c", script, "server"]
        return [self.typed(command) + " >/dev/null 2>&1 &"]

    def _log_path(self) -> str:
        running, server = self._state().get("running"), self.live()
        if running and (server is None or server["pid"] == running["pid"]):
            return running["log"]  # of a dead server too: that is when it is wanted most
        return (server or {}).get("log") or self.settings.log

    def _remember(self, server: Mapping[str, Any]) -> None:
        """Keep what the running server was started with, unless it is one that carries this adapter's flags."""
        # While another is missing already, this one was never known to be ready.
        ended = self.ended() or server["argv"]
        state = self._state()
        if not self._is_known(server):
            original = self.host.script("remember", pid=server["pid"], ticks=server["ticks"], env_file=self._env_file())
            state = {"original": original}
        self._save({**state, "ended": self._ended_now(ended)})

    def _is_known(self, server: Mapping[str, Any]) -> bool:
        """Whether what is kept as the original is this server's: this adapter started it, or could have.

        Someone may have started the patched command line by hand, or this tool was cut off when it had started it:
        what was there before it is still the original.
        """
        state = self._state()
        running, original = state.get("running"), state.get("original")
        if running and (running["pid"], running["ticks"]) == (server["pid"], server["ticks"]):
            return True
        lines = (apply_flags(original["argv"], self.settings.args), state.get("planned")) if original else ()
        return server["argv"] in lines and server["argv"] != original["argv"]

    def _env_file(self) -> str:
        return f"{self.host.state_dir}/service-{self.host.port}.env"

    def _state(self) -> Mapping[str, Any]:
        if self._cached is None:
            self._cached = _kept(self.host.ask, self.host.name, self.host.port)
        return self._cached

    def _save(self, state: Mapping[str, Any]) -> None:
        is_missing = "ended" in state and not self.host.venv_named
        last = {LAST_ENDED: {"port": self.host.port}} if "ended" in state else {}
        self.host.ask(
            "state",
            put={state_name(self.host.port): dict(state), **last},
            missing={"port": self.host.port, "is_missing": is_missing},
        )
        self._cached = state
