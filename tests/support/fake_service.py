"""A stand-in for a service whose process is what the test says; and a clock that only moves when someone waits."""

from types import SimpleNamespace

from patcher.hosts import ServiceSettings
from patcher.server.services.base import Service


class FakeClock:
    def __init__(self):
        self.time = 1000.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


class FakeService(Service):
    """`states`: what live() says, one after the other (the last one for ever); `why`: what failure() says."""

    kind = "fake"

    def __init__(self, *states, why=None, log="line 1\nline 2"):
        super().__init__(ServiceSettings(), SimpleNamespace(name="host", port=1))
        self.states = list(states)
        self.why = why
        self.log = log

    def live(self):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def failure(self):
        return self.why

    def log_since(self, marker=None):
        return self.log

    def started_since(self, when):
        return ["pid 10, port 2: python"]

    def main_pid(self):
        return None

    def by_hand(self):
        return []

    def restart(self, *, patched=True): ...

    def stop(self): ...

    def start(self, *, patched=True): ...


def process(pid=10, start_time=500.0, owner="server", other=None):
    """What Service.live() gives; `other` is the process that holds the port instead."""
    return {
        "pid": pid,
        "ticks": pid,
        "start_time": start_time,
        "argv": ["python"],
        "cwd": "/",
        "log": None,
        "tree": [pid],
        "listener": {"owner": owner, "process": other},
    }
