"""Series x installation -> what is to be written.  A plan is data: shown by a dry run and executed as it stands."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patcher.plan.server_action import ServerAction
from patcher.series import udiff
from patcher.series.model import PRISTINE, Series
from patcher.wire.types import Receipt

EARLIER = "an earlier series"
MIXED = "mixed"


@dataclass(frozen=True)
class Action:
    """What happens to one file; ``kind`` is "create", "modify", "delete" or "already" (nothing).

    ``before`` and ``after`` are sha256, None where the file does not exist; ``old`` and ``new`` the bytes.  With
    ``from_backup`` the host takes the bytes from its own backup; ``new`` is then known only if the host has shown it.
    ``state`` is what was found.
    """

    path: str
    kind: str
    state: str
    before: str | None
    after: str | None
    old: bytes | None
    new: bytes | None
    from_backup: bool = False

    @property
    def data(self) -> bytes | None:
        """The bytes to send."""
        return None if self.from_backup or self.kind == "already" else self.new


@dataclass(frozen=True)
class Plan:
    """``stage_from`` and ``stage_to`` are "pristine", a stage's name or "mixed".

    ``origin`` has per file the sha256 from before the first apply; ``receipt_found`` is the receipt on the host;
    ``server`` is None where nobody has looked at the server.
    """

    series: Series | None
    version: str
    stage_from: str
    stage_to: str
    actions: tuple[Action, ...]
    origin: Mapping[str, str | None]
    receipt_found: Receipt | None
    server: ServerAction | None = None

    @property
    def changes(self) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.kind != "already")

    @property
    def is_noop(self) -> bool:
        """Nothing to write, and the receipt on the host says so already."""
        return not self.changes and _core(self.receipt_found) == self.receipt()

    @property
    def identity(self) -> str | None:
        """Of the files after this plan, as a patched server reports it; None for files without the patch."""
        return self.series.identity(self.stage_to) if self.series and self.stage_to != PRISTINE else None

    def receipt(self) -> dict[str, Any] | None:
        """What the receipt must say after this plan; None if there must be none."""
        if self.series is None or self.stage_to == PRISTINE:
            return None
        return {
            "series": self.series.name,
            "package": self.series.package,
            "version": self.version,
            "stage": self.stage_to,
            "identity": self.identity,
            "files": {
                action.path: {"before": self.origin[action.path], "after": action.after}
                for action in self.actions
                if action.path in self.series.files
            },
        }

    def request(self) -> list[dict[str, Any]]:
        """The actions of a commit request."""
        return [
            {
                "path": action.path,
                "before": action.before,
                "after": action.after,
                "data": None if action.data is None else b64encode(action.data).decode(),
                "backup": action.from_backup,
            }
            for action in self.changes
        ]

    def modules(self) -> list[str]:
        """Dotted names of the modules that are written, for an import check."""
        paths = [action.path for action in self.changes if action.after is not None and action.path.endswith(".py")]
        return [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]

    def as_dict(self) -> dict[str, Any]:
        return {
            "series": self.series.name if self.series else None,
            "version": self.version,
            "stage_from": self.stage_from,
            "stage_to": self.stage_to,
            "identity": self.identity,
            "noop": self.is_noop,
            "actions": [
                {
                    "path": action.path,
                    "kind": action.kind,
                    "state": action.state,
                    "before": action.before,
                    "after": action.after,
                    "from_backup": action.from_backup,
                }
                for action in self.actions
            ],
            "server": self.server and self.server.as_dict(),
        }

    def unified_diff(self) -> bytes:
        """All changes as one diff; a file of which only the host has the new bytes is named in a comment."""
        parts = []
        for action in self.changes:
            if action.new is None and action.after is not None:
                parts.append(f"# {action.path}: restored from the backup on the host, {action.after}\n".encode())
            else:
                parts.append(udiff.make(action.path, action.old, action.new))
        return b"".join(parts)


def _core(receipt: Receipt | None) -> dict[str, Any] | None:
    """The part of a receipt that a plan decides."""
    if receipt is None:
        return None
    return {
        "series": receipt.series,
        "package": receipt.package,
        "version": receipt.version,
        "stage": receipt.stage,
        "identity": receipt.identity,
        "files": {path: {"before": told.before, "after": told.after} for path, told in receipt.files.items()},
    }
