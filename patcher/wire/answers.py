"""What the answers of agent/server.py, and the state that the process adapter keeps on the host, must look like."""

from __future__ import annotations

import json
from typing import Any

from patcher.errors import BadAnswer
from patcher.wire.shapes import COUNT, TIME, problem

_SERVER = {"pid": COUNT, "ticks": COUNT, "start_time": TIME, "argv": [str], "cwd": (str, None), "log": (str, None)}
_OTHER = {"pid": COUNT, "start_time": TIME, "argv": [str]}
_ORIGINAL = {"argv": [str], "cwd": str, "uid": COUNT, "gid": COUNT, "umask": COUNT}
_ENDED = {"argv": [str], "port": COUNT, "since": TIME, "by": str}
_STARTED = {"pid": COUNT, "ticks": COUNT, "start_time": TIME, "log": str}
_ANSWERS = {
    "status": {"now": TIME, "server": (None, _SERVER), "listener": {"owner": str, "process": (None, _OTHER)}},
    "remember": _ORIGINAL,
    "stop": {},
    "port_free": {},
    "start": _STARTED,
    "run": {"rc": int},
    "read_log": {"text": str, "size": COUNT, "problem": (str, None)},
}


def answer_of(op: str, printed: str, host: str) -> dict[str, Any]:
    """The answer to an operation, or {"error": text, ...}. Raises BadAnswer for anything else."""
    try:
        answer = json.loads(printed)
    except (ValueError, RecursionError) as error:
        raise _bad(f"{op!r}: {error}", host) from error
    if problem(answer, {"error": str}):
        found = problem(answer, _ANSWERS[op])
        if found:
            raise _bad(f"{op!r}: {found}", host)
    return answer


def kept_state(value: Any, host: str) -> dict[str, Any]:
    """What the process adapter kept: {}, or {"original"} with or without the other names. Raises BadAnswer."""
    found = problem(value, (None, {}))
    for name, shape in (
        ("original", _ORIGINAL),
        ("planned", [str]),
        ("running", {**_STARTED, "argv": [str]}),
        ("ended", _ENDED),
    ):
        if not found and value and value.get(name) is not None:
            found = problem(value[name], shape)
    if found:
        raise _bad(f"'state': {found}", host)
    return value or {}


def last_ended_port(value: Any, host: str) -> int | None:
    """The port in {"port"}, None for None. Raises BadAnswer."""
    found = problem(value, (None, {"port": COUNT}))
    if found:
        raise _bad(f"'state': {found}", host)
    return value["port"] if value else None


def _bad(why: str, host: str) -> BadAnswer:
    return BadAnswer(
        f"what the host says of the server's processes makes no sense: {why}",
        where=host,
        next_step="look at that host before it is trusted with anything",
    )
