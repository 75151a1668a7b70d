"""The causes, each a real one: it strikes while the agent stands still before a step."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.builders import PRISTINE
from tests.support.installations import Installation

ORDER = [path for path in sorted(PRISTINE) if path.endswith(("args.py", "ddtree.py", "info.py", "worker.py"))]
WORKER = "sglang/srt/worker.py"
THEIRS = b"# by someone else\n"
# The harshest that ext4 offers: data is not written before the names that lead to it, renames flush nothing, and
# nothing is committed to the file system's journal but by fsync.
EXT4 = "loop,data=writeback,noauto_da_alloc,commit=300"


def sh(*argv: object) -> None:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, argv))}: {done.stderr.strip()}")


class Fault:
    """One cause on one installation. host: where its venv lies; folder: scratch space of the cell.

    The plain one is nothing but a death (SIGKILL, and the two that the way to the host dies of: see cell.py).
    """

    fatal = False  # the agent is killed, and not continued

    def __init__(self, folder: Path):
        self.folder, self.host = folder, folder / "host"

    def place(self, start: Path) -> None:
        """Put a copy of the installation START there, on the file system that the fault needs."""
        sh("cp", "-a", start, self.host)

    def strike(self, installation: Installation, changed: list[str], point: str) -> None:
        """changed: files that the job changes, in its order."""

    def lift(self) -> None:
        """What an operator does about it."""

    def close(self) -> None:
        pass


class Killed(Fault):
    fatal = True


class NoSpace(Fault):
    """A tmpfs without a free byte."""

    def place(self, start: Path) -> None:
        self.host.mkdir()
        sh("mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", self.host)
        sh("cp", "-a", f"{start}/.", self.host)

    def strike(self, installation: Installation, changed: list[str], point: str) -> None:
        with open(self.host / "filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    def lift(self) -> None:
        (self.host / "filler").unlink()

    def close(self) -> None:
        sh("umount", "-l", self.host)


class ReadOnly(Fault):
    """The whole venv is seen through a read-only mount."""

    def strike(self, installation: Installation, changed: list[str], point: str) -> None:
        sh("mount", "--bind", self.host, self.host)
        sh("mount", "-o", "remount,bind,ro", self.host)

    def lift(self) -> None:
        sh("umount", self.host)


class Busy(Fault):
    """The next file to be renamed over, or put back, becomes a mount point."""

    def strike(self, installation: Installation, changed: list[str], point: str) -> None:
        files = [*(installation.site / path for path in changed), installation.record]
        step, _, number = point.partition(":")
        if step == "undo":
            files.reverse()
        done = {"rename": int(number) - 1, "record": len(changed), "undo": int(number) - 1}.get(step, 0)
        self.file = next(file for file in files[done:] if file.exists())
        sh("mount", "--bind", self.file, self.file)

    def lift(self) -> None:
        sh("umount", self.file)


class NoPermission(Fault):
    """The package's directories lose their write bits; the agent is no user whom that does not bind (see cell.py)."""

    def strike(self, installation: Installation, changed: list[str], point: str) -> None:
        self.folders = [installation.site / "sglang/srt", installation.site / "sglang", installation.record.parent]
        for folder in self.folders:
            folder.chmod(0o555)

    def lift(self) -> None:
        for folder in self.folders:
            folder.chmod(0o755)


class Changed(Fault):
    """Someone appends a line to an installed file."""

    def strike(self, installation: Installation, changed: list[str], point: str) -> None:
        with open(installation.site / WORKER, "ab") as file:
            file.write(THEIRS)


class PowerLoss(Fault):
    """An ext4 file system in an image file, which is copied as it stands: the disk without the page cache.

    START's image is made once, beside it.
    """

    fatal = True

    def place(self, start: Path) -> None:
        self.disk, self.lost = self.folder / "disk", self.folder / "lost"
        sh("cp", "--sparse=always", start.with_suffix(".ext4"), self.disk)
        self.host.mkdir()
        sh("mount", "-o", EXT4, self.disk, self.host)

    def strike(self, installation: Installation, changed: list[str], point: str) -> None:
        sh("cp", "--sparse=always", self.disk, self.lost)

    def lift(self) -> None:
        """The machine starts again: the file system's own journal is replayed."""
        sh("umount", self.host)
        sh("mount", "-o", EXT4, self.lost, self.host)

    def close(self) -> None:
        sh("umount", self.host)


def make_image(start: Path) -> None:
    """The ext4 image of an installation, for PowerLoss."""
    image, mounted = start.with_suffix(".ext4"), start.with_suffix(".mounted")
    with open(image, "wb") as file:
        file.truncate(24 << 20)
    sh("mkfs.ext4", "-q", "-F", "-I", "256", "-d", start, image)
    mounted.mkdir()
    sh("mount", "-o", EXT4, image, mounted)  # once, so that the first mount of a cell has nothing left to set up
    sh("umount", mounted)


CAUSES = {
    "SIGKILL": Killed,
    "channel cut": Fault,
    "client killed": Fault,
    "ENOSPC": NoSpace,
    "EROFS": ReadOnly,
    "EBUSY": Busy,
    "EACCES": NoPermission,
    "changed file": Changed,
    "power loss": PowerLoss,
}
