"""From the agent's reply, which is input like any other, to its type.

The host may be broken, or somebody else's by now. What a value means is still for the commands to judge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from patcher.errors import BadAnswer
from patcher.typed import Misfit, typed
from patcher.wire.types import Inspection, State

R = TypeVar("R")


def reply_as(kind: type[R], request: Mapping[str, Any], reply: Mapping[str, Any], host: str) -> R:
    """The reply to this request as its type. Raises BadAnswer."""
    try:
        answer = typed(reply, kind)
        if isinstance(answer, Inspection):
            _agree(request, answer)
            if answer.receipt:
                receipt = msgspec.structs.replace(answer.receipt, whole=reply["receipt"])
                answer = msgspec.structs.replace(answer, receipt=receipt)
        if isinstance(answer, State):
            for name in request.get("get", ()):
                if name not in answer.values:
                    raise Misfit(("values", name), "it is missing")
    except Misfit as misfit:
        raise bad_answer(f"to {request['op']!r}: {misfit}", host) from misfit
    return answer


def bad_answer(why: str, host: str) -> BadAnswer:
    return BadAnswer(
        f"the host's answer is none of this tool's agent {why}",
        where=host,
        next_step="something else answers there, or changes the answers: look at that host before it is "
        "trusted with anything",
    )


def _agree(request: Mapping[str, Any], inspection: Inspection) -> None:
    """Raise Misfit where an inspection contradicts the request or itself."""
    files, receipt = inspection.files, inspection.receipt
    if not request.get("site_packages") and inspection.interpreter is None:
        raise Misfit(("interpreter",), "it is missing")
    if (receipt is None) != (inspection.receipt_state == "none"):
        raise Misfit(("receipt_state",), "it contradicts the receipt")
    for path in (*request.get("paths", ()), *(receipt.files if receipt else ())):
        if path not in files:
            raise Misfit(("files", path), "it is missing")
    for path, entry in files.items():
        if (None if entry.data is None else hashlib.sha256(entry.data).hexdigest()) != entry.sha256:
            raise Misfit(("files", path), "data and sha256 do not belong together")
