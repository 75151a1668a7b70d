"""Wait until a restarted server really serves: a new process, its own port, and every sampling path answered once.

A health check is not enough: it sends temperature 0 and one token, and so never touches what the suite is about, and
it is answered by the old process while that is still there. The first request of a sampling path may compile kernels
for minutes and hold up every other request, so each is sent, and waited for, before the server is called ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from patcher.errors import NotReady
from patcher.installation.find import redacted
from patcher.server.client import HttpStatus, ServerProblem, SglangClient
from patcher.server.services.base import CLOCK_SLACK_S, Service
from patcher.smoke.suite import SAMPLING_PATHS, Prompt

POLL_S = 2.0
HEALTH_TIMEOUT_S = 20.0
# How long a process from before may still hold the port beside the new one: it may be on its way out.
OLD_LISTENER_S = 60.0
WARM_TOKENS = 8


@dataclass(frozen=True)
class ReadyReport:
    """What was waited for. `warmed`: seconds until the first answer of each sampling path.

    `listener_verified` is False when the host does not let us see whose the listening socket is.
    """

    pid: int
    start_time: float
    seconds: float
    warmed: Mapping[str, float]
    listener_verified: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def wait_ready(
    service: Service,
    client: SglangClient,
    paths: Sequence[str],
    prompt: Prompt,
    *,
    deadline_s: float,
    started_after: float,
    progress: Callable[[str], None] = lambda text: None,
    log_marker: Mapping[str, Any] | None = None,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ReadyReport:
    """Wait for the server that was just started.

    `paths`: keys of SAMPLING_PATHS. `started_after`: unix time on the host; a process older than that is not the new
    one. `deadline_s`: seconds from now for all of it. Raises NotReady, with the last lines logged since `log_marker`,
    when the process dies, when it cannot get its port, when a sampling path is refused, or at the deadline.
    """
    watch = _Watch(service, started_after, deadline_s, log_marker, progress, now, sleep)
    watch.wait_for_port()
    _wait_for_health(watch, client)
    warmed = {}
    for path in paths:
        begun = now()
        _warm(watch, client, path, prompt)
        warmed[path] = round(now() - begun, 1)
    server = watch.look()  # the answers have to be this process's own, the last one too
    if server is None:
        raise watch.failed("the new server process is gone", "see the last lines of its log below")
    return ReadyReport(
        pid=server["pid"],
        start_time=server["start_time"],
        seconds=round(now() - watch.begun, 1),
        warmed=warmed,
        listener_verified=server["listener"]["owner"] == "server",
    )


class _Watch:
    """The new process, looked at again and again while something else is waited for."""

    def __init__(
        self,
        service: Service,
        started_after: float,
        deadline_s: float,
        log_marker: Mapping[str, Any] | None,
        progress: Callable[[str], None],
        now: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self.service = service
        self.started_after = started_after - CLOCK_SLACK_S
        self.deadline_s = deadline_s
        self.log_marker = log_marker
        self.progress = progress
        self.now = now
        self.sleep = sleep
        self.begun = now()
        self.process: tuple[int, int] | None = None
        self.old_listener_since: float | None = None
        self.old_server: Mapping[str, Any] | None = None

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 when it is past."""
        return max(0.0, self.begun + self.deadline_s - self.now())

    def pause(self, waiting_for: str, *, since: float | None = None, done: threading.Event | None = None) -> None:
        """One round of waiting, cut short by `done`. Raises NotReady at the deadline."""
        if self.left <= 0:
            raise self.failed(
                f"the deadline of {self.deadline_s:g} s is over; still {waiting_for}",
                "see the log; for a server that needs longer, raise ready.deadline",
            )
        self.progress(f"{waiting_for}, {self.now() - (self.begun if since is None else since):.0f} s so far")
        # More often towards the deadline, so that a server that makes it by a second is seen to.
        (done.wait if done else self.sleep)(max(0.1, min(POLL_S, self.left / 2)))

    def look(self) -> dict[str, Any] | None:
        """The new server process as it is now; None before it appears. Raises NotReady once it is dead."""
        server = self.service.live()
        fresh = server is not None and server["start_time"] >= self.started_after
        self.old_server = server if server is not None and not fresh else None
        if self.process is not None:
            if server is None or (server["pid"], server["ticks"]) != self.process:
                why = self.service.failure()
                raise self.failed(
                    f"the new server process {self.process[0]} died" + (f": {why}" if why else ""),
                    "see the last lines of its log below",
                )
        elif server and fresh:
            self.process = (server["pid"], server["ticks"])
        elif server is None and (why := self.service.failure()):
            raise self.failed(f"the server does not start: {why}", "see the last lines of its log below")
        return server if fresh else None

    def wait_for_port(self) -> None:
        """Until a new process of the service listens on the port."""
        while True:
            server = self.look()
            owner = server["listener"]["owner"] if server else ""
            if owner in ("server", "unseen"):
                return
            if server and owner == "other":
                self._mind_other_listener(server["listener"]["process"])
                self.pause(f"waiting for the port, which process {server['listener']['process']['pid']} holds")
            else:
                if self.old_server and self.old_server["listener"]["owner"] == "server":
                    self._mind_other_listener(self.old_server)
                self.pause("waiting for the server to listen" if server else "waiting for the new server process")

    def _mind_other_listener(self, other: Mapping[str, Any]) -> None:
        if self.old_listener_since is None:
            self.old_listener_since = self.now()
        if self.now() - self.old_listener_since >= OLD_LISTENER_S:
            age = "from before the restart" if other["start_time"] < self.started_after else "of another program"
            new = "".join(f"; started meanwhile: {line}" for line in self.service.started_since(self.started_after))
            raise self.failed(
                f"the port is held by process {other['pid']} {age}, so the new server took another one or waits for it",
                f"end process {other['pid']} ({' '.join(redacted(other['argv']))[:120]}) by hand, then restart{new}",
            )

    def failed(self, what: str, next_step: str) -> NotReady:
        return NotReady(
            what, where=self.service.host.name, next_step=next_step, detail=self.service.last_log(self.log_marker)
        )


def _wait_for_health(watch: _Watch, client: SglangClient) -> None:
    while True:
        try:
            client.health(timeout=min(HEALTH_TIMEOUT_S, max(1.0, watch.left)))
            return
        except ServerProblem as problem:
            watch.look()
            watch.pause(f"waiting for /health ({_brief(problem)})")


def _warm(watch: _Watch, client: SglangClient, path: str, prompt: Prompt) -> None:
    """One sampled request, answered; sent again while the server says that it is busy or not yet there."""
    name, begun = path.replace("_top", "+top"), watch.now()
    while True:
        request = _Request(client, prompt, SAMPLING_PATHS[path], watch.left)
        while not request.done.is_set():
            watch.pause(
                f"waiting for first {name} request: kernels may compile for minutes", since=begun, done=request.done
            )
            watch.look()
        if request.problem is None:
            return
        watch.look()
        if not isinstance(request.problem, ServerProblem):
            raise request.problem
        if isinstance(request.problem, HttpStatus) and request.problem.status != 503:
            raise watch.failed(f"the first {name} request failed: {request.problem.what}", "see the server's log below")
        watch.pause(f"waiting for first {name} request ({_brief(request.problem)})", since=begun)


class _Request:
    """A /generate request under way on a thread of its own, so that the process can be watched meanwhile.

    The thread is left to itself when the wait is given up: its socket's timeout, or the server's end, ends it.
    """

    def __init__(self, client: SglangClient, prompt: Prompt, sampling: Mapping[str, Any], timeout: float) -> None:
        self.done = threading.Event()
        self.problem: Exception | None = None
        payload = {
            **prompt.payload(),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": WARM_TOKENS, **sampling},
        }
        threading.Thread(target=self._send, args=(client, payload, max(1.0, timeout)), daemon=True).start()

    def _send(self, client: SglangClient, payload: Mapping[str, Any], timeout: float) -> None:
        try:
            client.generate(payload, timeout=timeout)
        except Exception as error:  # handed to the waiting thread, which raises or judges it
            self.problem = error
        finally:
            self.done.set()


def _brief(problem: ServerProblem) -> str:
    return f"HTTP {problem.status}" if isinstance(problem, HttpStatus) else problem.what
