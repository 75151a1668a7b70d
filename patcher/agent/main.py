"""One request, one reply."""

from __future__ import annotations

import json
import os
import sys
import traceback
import zlib

from .commit import commit
from .failures import Refusal, os_refusal
from .journal import recover
from .look import forget, history, inspect, state
from .missing import noted
from .processes import launchers
from .programs import run_python
from .site import Site

OPERATIONS = {
    "inspect": inspect,
    "commit": commit,
    "forget": forget,
    "history": history,
    "state": state,
    "run_python": run_python,
}


def answer(request: dict) -> dict:
    if request["op"] == "processes":
        return {"processes": launchers(), "missing": noted()}
    site = Site(request.get("package") or "sglang", request.get("site_packages"))
    before = recover(site, request.get("who", ""))
    if request["op"] == "recover":
        return before
    return {**OPERATIONS[request["op"]](site, request), "recovered": before["recovered"], "left": before["left"]}


def main() -> None:
    os.umask(0o022)
    request = json.loads(zlib.decompress(sys.stdin.buffer.read()))  # cut short, it raises, and nothing is done
    try:
        reply = answer(request)
    except Refusal as refusal:
        reply = {"error": refusal.reply}
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else "/"
        reply = {"error": {**os_refusal(error, place).reply, "detail": traceback.format_exc()}}
    except Exception as error:
        reply = {
            "error": {
                "kind": "DdtreePatchError",
                "what": f"the agent failed: {error!r}",
                "where": request["op"],
                "next": "report this, with the trace",
                "detail": traceback.format_exc(),
            }
        }
    data = zlib.compress(json.dumps(reply).encode())
    try:
        sys.stdout.buffer.write(b"\n<<ddtree-agent %s %d>>\n" % (request["nonce"].encode(), len(data)) + data + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)  # nobody listens any more; the work is done all the same
