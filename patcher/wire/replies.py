"""What the agent's replies must look like.

The host may be broken, or somebody else's by now: what it says is input. After `check` every value that the jobs rely
upon is there and of its type; what it means is still for them to judge.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from patcher.errors import BadAnswer
from patcher.wire.shapes import ANY, BASE64, COUNT, SHA256, TIME, each, problem

_TEXT = (str, None)
ERROR = {"kind": str, "what": str, "where": str, "next": str}
_TOLD = {"before": (SHA256, None), "after": (SHA256, None)}
_RECEIPT = {
    "series": str,
    "package": str,
    "version": str,
    "stage": str,
    "identity": str,
    "by": str,
    "files": each(_TOLD),
    "host": {"commit_time": TIME},
}
_HOLDER = {"pid": COUNT, "who": str, "host": str, "since": TIME}
_FILE = {
    "sha256": (SHA256, None),
    "record_sha256": _TEXT,
    "size": (COUNT, None),
    "link": _TEXT,
    "links": (COUNT, None),
    "data": (BASE64, None),
    "before_data": (BASE64, None),
}
_PROCESS = {
    "pid": COUNT,
    "argv": [str],
    "exe": _TEXT,
    "python": _TEXT,
    "prefix": _TEXT,
    "real_prefix": _TEXT,
    "listening": [COUNT],
    "sglang_root": _TEXT,
    "pycache_prefix": _TEXT,
    "start_time": TIME,
    "keeper": (None, {"kind": str, "name": str}),
}
_INTERPRETER = {"executable": str, "version": str, "prefix": str, "real_prefix": str}
_REPLIES = {
    "processes": {"processes": [_PROCESS], "missing": [{"port": COUNT, "python": str}]},
    "inspect": {
        "root": str,
        "version": str,
        "editable": bool,
        "state_dir": str,
        "package_dir": str,
        "files": each(_FILE),
        "interpreter": (None, _INTERPRETER),
        "receipt": (None, _RECEIPT),
        "receipt_state": str,
        "journal": bool,
        "lock": (None, _HOLDER),
        "missing_backups": [str],
        "free_bytes": COUNT,
        "recovered": str,
        "left": [str],
        "exposed": [str],
        "writable": (None, {"path": str, "mount": str, "reason": str}),
    },
    "commit": {"commit_time": TIME, "record": str, "read_back": each((SHA256, None))},
    "history": {"lines": [{"event": str, "time": TIME, "who": str}]},
    "state": {"values": each(ANY)},
    "run_python": {"rc": int, "stdout": str, "stderr": str},
    "forget": {},
    "recover": {},
}


def check(request: Mapping[str, Any], reply: Mapping[str, Any], host: str) -> Mapping[str, Any]:
    """`reply` itself, when it is one to this request. Raises BadAnswer."""
    op = request["op"]
    found = problem(reply, _REPLIES[op])
    if not found and op == "inspect":
        found = _about_files(request, reply)
    if not found and op == "state":
        found = next((f"{name} is missing" for name in request.get("get", ()) if name not in reply["values"]), "")
    if found:
        raise bad_answer(f"to {op!r}: {found}", host)
    return reply


def bad_answer(why: str, host: str) -> BadAnswer:
    return BadAnswer(
        f"the host's answer is none of this tool's agent {why}",
        where=host,
        next_step="something else answers there, or changes the answers: look at that host before it is "
        "trusted with anything",
    )


def _about_files(request: Mapping[str, Any], reply: Mapping[str, Any]) -> str:
    """In what the files of an inspection contradict the request, the receipt or themselves."""
    files, receipt = reply["files"], reply["receipt"]
    if not request.get("site_packages") and reply["interpreter"] is None:
        return "interpreter is missing"
    if (receipt is None) != (reply["receipt_state"] == "none"):
        return "receipt and receipt_state contradict each other"
    for path in (*request.get("paths", ()), *(receipt["files"] if receipt else ())):
        if path not in files:
            return f"files: {path} is missing"
    for path, entry in files.items():
        data = entry["data"]
        if (None if data is None else hashlib.sha256(b64decode(data)).hexdigest()) != entry["sha256"]:
            return f"files: {path}: data and sha256 do not belong together"
    return ""
