"""An operation on an installation, after what an earlier run left unfinished there."""

from __future__ import annotations

from collections.abc import Callable

from .journal import recover
from .site import Site


def on_site(operation: Callable[..., dict], request: dict) -> dict:
    """Undo or finish what was left, then run the operation; its reply says what was done. `recover` is that alone."""
    site = Site(request.get("package") or "sglang", request.get("site_packages"))
    before = recover(site, request.get("who", ""))
    if operation is recover:
        return before
    return {**operation(site, request), "recovered": before["recovered"], "left": before["left"]}
