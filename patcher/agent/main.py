"""One request, one reply."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import zlib
from collections.abc import Callable

from .failures import Refusal, os_refusal
from .operations import ON_A_SITE, ON_THE_HOST, SITE_ENTRY


def answer(request: dict) -> dict:
    """What the operation replies. Only the modules that it needs are there."""
    op = request["op"]
    if op in ON_THE_HOST:
        return _function(ON_THE_HOST[op], op)(request)
    return _function(SITE_ENTRY, "on_site")(_function(ON_A_SITE[op], op), request)


def _function(module: str, name: str) -> Callable[..., dict]:
    return getattr(importlib.import_module(f".{module}", __package__), name)


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
