"""What comes back from a host that lies: the agent's own replies with damage, through the connection and the jobs."""

from __future__ import annotations

import copy
import json
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from patcher.commands.apply import Apply
from patcher.commands.apply_plan import ApplyOptions
from patcher.commands.doctor import Doctor
from patcher.commands.revert import Revert, RevertOptions
from patcher.commands.status import Diff, History, List, Status
from patcher.commands.verify import Verify
from patcher.errors import DdtreePatchError
from patcher.hosts import EndpointSettings, HostSettings
from patcher.installation.session import Session
from patcher.report.outcome import HostResult
from patcher.rollout.run import Job
from patcher.rollout.unit import PhaseFailed, Unit
from patcher.series.model import Series
from patcher.ssh.connection import Completed, LocalConnection
from patcher.wire.call import BOOTSTRAP
from tests.fuzz.damage import damaged

ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    1e300,
    10**30,
    "",
    "x",
    "0" * 64,
    "\x1b[2J\x1b]0;owned\x07",
    "\ud800",
    "../../etc/passwd",
    "a\0b",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"files": {}},
    ["x"] * 3,
    "annotations",
    "DdtreePatchError",
    "Sequence",
    "RollbackFailed",
    "%%%",
)
FRAMES = (
    b"",
    b"\xff" * 99,
    b"null",
    b"[]",
    b"1",
    b'"error"',
    b'{"error": 1}',
    b'{"error": {}}',
    b"[" * 100_000,
    b'{"a": ' * 100_000,
    b"9" * 5000,
    b'{"error": {"kind": "Any", "what": "", "where": "", "next": ""}}',
)
LOOKS: tuple[Callable[[Session], Job], ...] = (
    List,
    Status,
    History,
    Doctor,
    Verify,
    lambda session: Diff(session, ""),
    lambda session: Apply(Unit([session]), ApplyOptions(dry_run=True)),
    lambda session: Revert(Unit([session]), RevertOptions(dry_run=True)),
)
CHANGES: tuple[Callable[[Session], Job], ...] = (
    lambda session: Apply(Unit([session]), ApplyOptions()),
    lambda session: Revert(Unit([session]), RevertOptions()),
)
INTERPRETER = {"executable": "/opt/v/bin/python3", "version": "3.11.7", "prefix": "/opt/v", "real_prefix": "/opt/v"}
SERVER = {
    "pid": 77,
    "argv": ["python3", "-m", "sglang.launch_server", "--port", "30000", "--api-key", "s3cret"],
    "exe": "/usr/bin/python3",
    "python": "/opt/v/bin/python3",
    "prefix": "/opt/v",
    "real_prefix": "/opt/v",
    "listening": [30000],
    "sglang_root": None,
    "pycache_prefix": None,
    "start_time": 1.7e9,
    "keeper": None,
}
WATCHED = {"pid": 77, "ticks": 7, "start_time": 1.7e9, "argv": SERVER["argv"], "cwd": "/", "log": None}
SCRIPT = {
    "status": {"now": 1.8e9, "server": WATCHED, "listener": {"owner": "server", "process": None}},
    "read_log": {"text": "", "offset": 0, "size": 0, "problem": None},
}
OP = {"path": "sgl_kernel.op", "problem": None}
PROBE = {
    "versions": {"torch": "2.11.0"},
    "driver": None,
    "cuda": None,
    "gpus": ["H200"],
    "imports": {"verify": OP},
    "trees": {"trees": 1, "wrong": 0, "first_wrong": None},
    "traps": {"a": {"as_known": True, "found": 1}},
    "renorm": {"top_k": True},
    "sglang_available": True,
    "sglang_problem": None,
    "torch_problem": None,
    "problem": None,
}


class HostileHost(LocalConnection):
    """A host whose agent is asked in truth, once for each request, and whose replies are damaged on the way back.

    Nothing is written or run there, and no process is looked at: those replies are made up, so that no damage to them
    can lead to a real process or file. As a venv it is the same tree, with an interpreter and a server made up.
    """

    def __init__(self, site: Path, committed: dict[str, Any]) -> None:
        super().__init__("hostile")
        self.site, self.committed = site, committed
        self.known: dict[str, bytes] = {}
        self.rng = Random()

    def open_socket(self, host, port, timeout=30):
        raise ConnectionRefusedError("nobody listens")

    def _run(self, argv, input, timeout, on_stderr):
        size = int(argv[4])
        request = json.loads(zlib.decompress(input[size:]))
        nonce = request.pop("nonce")
        key = json.dumps(request, sort_keys=True)
        if key not in self.known:
            self.known[key] = json.dumps(self._true_reply(input[:size], request)).encode()
        return self._lie(self.known[key], nonce)

    def _true_reply(self, agent: bytes, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op in ("commit", "forget") or request.get("put"):
            return self.committed
        if op == "processes":
            return {"processes": [SERVER], "missing": [{"port": 30000, "python": "/opt/v/bin/python3"}]}
        if op == "run_python":
            asked = json.loads(request["argv"][0]) if request["argv"][0].startswith("{") else {}
            return {"rc": 0, "stdout": json.dumps(SCRIPT.get(asked.get("op"), PROBE)), "stderr": ""}
        request = {**request, "site_packages": str(self.site), "nonce": "0" * 32}
        argv = [sys.executable, "-I", "-c", BOOTSTRAP, str(len(agent))]
        done = super()._run(argv, agent + zlib.compress(json.dumps(request).encode()), 600, lambda piece: None)
        framed = re.search(rb"<<ddtree-agent 0{32} \d+>>\n(.*)\n", done.stdout, re.DOTALL)
        reply = json.loads(zlib.decompress(framed[1]))
        return reply | ({"interpreter": INTERPRETER} if op == "inspect" else {})

    def _lie(self, reply: bytes, nonce: str) -> Completed:
        rng = self.rng
        kind = rng.randrange(12)
        if kind < 5:
            return self._framed(reply, nonce)
        if kind < 10:
            value = json.loads(reply)
            for _ in range(rng.choice((1, 1, 2, 4))):
                value = altered(rng, value)
            return self._framed(json.dumps(value).encode(), nonce)
        if kind == 10:
            return self._framed(rng.choice(FRAMES), nonce, compressed=rng.random() < 0.5)
        framed = self._framed(reply, nonce).stdout
        return Completed(rng.choice((0, 1, 126, 127, 255, -9)), damaged(rng, framed), rng.choice((b"", b"\xff\x1b[2J")))

    @staticmethod
    def _framed(reply: bytes, nonce: str, compressed: bool = True) -> Completed:
        reply = zlib.compress(reply) if compressed else reply
        return Completed(0, b"noise\n<<ddtree-agent %s %d>>\n%s\n" % (nonce.encode(), len(reply), reply), b"")


def altered(rng: Random, value: Any) -> Any:
    """VALUE with something in it exchanged, taken out, or put elsewhere."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return rng.choice(ODD)
    holder, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, name = rng.choice(places)
        if isinstance(other, dict) or name < len(other):
            holder[key] = copy.deepcopy(other[name])
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD))
    return value


def _places(value: Any):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


class Replies:
    """Jobs against one installation whose host lies. `check(seed)` runs one job; raises what it raises."""

    def __init__(self, series: Series, site: Path, committed: dict[str, Any]) -> None:
        common = {"name": "hostile", "local": True, "endpoint": EndpointSettings(port=30000)}
        self.tree = HostSettings(**common, site_packages=str(site))
        self.venv = HostSettings(**common, venv=INTERPRETER["prefix"])
        self.series = series
        self.connection = HostileHost(site, committed)

    def check(self, seed: str) -> str:
        rng = self.connection.rng = Random(seed)
        result = HostResult("hostile")
        host, jobs = rng.choice(((self.tree, (*LOOKS, *CHANGES)), (self.venv, LOOKS)))
        try:
            job = rng.choice(jobs)(Session(host, self.connection, result, (self.series,)))
            job.prepare()
            job.execute()
        except DdtreePatchError as error:
            json.dumps(error.as_dict())
            raise
        except PhaseFailed as failure:
            json.dumps(failure.errors["hostile"].as_dict())
            raise failure.errors["hostile"] from failure
        json.dumps(result.as_dict())
        return "applied" if result.changed else "accepted"
