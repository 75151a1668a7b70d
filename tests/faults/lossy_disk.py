"""A model of the harshest disk that POSIX allows: what was not synced by itself may be there after a crash, or not.

Unlike a real file system it keeps no order: of the changes to a directory since its last fsync any may be lost, and a
file has the bytes of its last fsync, or none. What the agent does is recorded as it calls the system.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

DIRECTORY = -1
STATE = ".ddtree-patch"


@dataclass(frozen=True)
class Change:
    """One atomic change of a directory: name -> inode, DIRECTORY, or None for gone."""

    folder: str
    names: dict[str, int | None]


@dataclass(frozen=True)
class Synced:
    """An fsync: of a directory (data None), or of a file's bytes."""

    path: str
    inode: int = DIRECTORY
    data: bytes | None = field(default=None, repr=False)


class LossyDisk:
    """Records what happens below ROOT while `recording`, and builds what a crash may leave of it."""

    def __init__(self, root: Path):
        self.root = os.path.realpath(root)
        self.names: dict[str, int] = {}  # absolute path -> inode, now
        self.data: dict[int, bytes] = {}
        self.events: list[Change | Synced] = []
        for folder, directories, files in os.walk(self.root):
            for name in directories:
                self.names[os.path.join(folder, name)] = DIRECTORY
            for name in files:
                path = os.path.join(folder, name)
                self.names[path] = len(self.data)
                self.data[len(self.data)] = Path(path).read_bytes()
        self.before = dict(self.names)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        real = {name: getattr(os, name) for name in ("open", "fsync", "rename", "link", "unlink", "mkdir", "rmdir")}
        try:
            for name, call in real.items():
                setattr(os, name, self._recorded(getattr(self, f"_{name}"), call))
            yield
        finally:
            for name, call in real.items():
                setattr(os, name, call)

    @staticmethod
    def _recorded(note: Callable, call: Callable) -> Callable:
        def recorded(*given, **more):
            args = list(given)
            for at, handle in enumerate((more.get("src_dir_fd", more.get("dir_fd")), more.get("dst_dir_fd"))):
                if handle is not None:
                    args[at] = os.path.normpath(os.path.join(os.readlink(f"/proc/self/fd/{handle}"), args[at]))
            there = note is not None and isinstance(args[0], str) and os.path.lexists(args[0])
            result = call(*given, **more)
            note(there, *args)
            return result

        return recorded

    def _change(self, folder: str, names: dict[str, int | None]) -> None:
        if not (folder + "/").startswith(self.root + "/"):
            return
        self.events.append(Change(folder, names))
        for name, inode in names.items():
            path = os.path.join(folder, name)
            self.names.pop(path, None)
            if inode is not None:
                self.names[path] = inode

    def _open(self, there: bool, path: object, flags: int, *_) -> None:
        if flags & os.O_CREAT and not there:
            inode = len(self.data)
            self.data[inode] = b""
            self._change(os.path.dirname(path), {os.path.basename(path): inode})

    def _fsync(self, there: bool, handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if os.path.isdir(path):
            self.events.append(Synced(path))
        elif path in self.names:
            self.events.append(Synced(path, self.names[path], Path(path).read_bytes()))

    def _rename(self, there: bool, old: str, new: str) -> None:
        self._change(os.path.dirname(new), {os.path.basename(old): None, os.path.basename(new): self.names[old]})

    def _link(self, there: bool, old: str, new: str) -> None:
        self._change(os.path.dirname(new), {os.path.basename(new): self.names[old]})

    def _unlink(self, there: bool, path: str) -> None:
        self._change(os.path.dirname(path), {os.path.basename(path): None})

    _rmdir = _unlink

    def _mkdir(self, there: bool, path: str, *_) -> None:
        self._change(os.path.dirname(path), {os.path.basename(path): DIRECTORY})

    def crash(self, after: int, keep: float, dice: random.Random, target: Path) -> None:
        """Build in TARGET what may be there after the first AFTER events: of what was not synced, KEEP of 1 stays."""
        data = {inode: content for inode, content in self.data.items() if inode in self.before.values()}
        pending: dict[str, list[Change]] = {}
        names = dict(self.before)
        for event in self.events[:after]:
            if isinstance(event, Change):
                pending.setdefault(event.folder, []).append(event)
            elif event.data is None:
                for change in pending.pop(event.path, []):
                    _apply(names, change)
            else:
                data[event.inode] = event.data
        for change in (change for changes in pending.values() for change in changes if dice.random() < keep):
            _apply(names, change)
        target.mkdir()
        for path, inode in sorted(names.items()):
            copy = target / os.path.relpath(path, self.root)
            if not copy.parent.is_dir():
                continue  # the directory itself was lost
            private = STATE in copy.parts
            if inode == DIRECTORY:
                copy.mkdir(mode=0o700 if private else 0o755)
            else:
                copy.write_bytes(data.get(inode, b""))
                copy.chmod(0o600 if private else 0o644)


def _apply(names: dict[str, int | None], change: Change) -> None:
    for name, inode in change.names.items():
        path = os.path.join(change.folder, name)
        names.pop(path, None)
        if inode is not None:
            names[path] = inode
