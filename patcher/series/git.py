"""git on a work tree, without the settings of the user and of the machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from patcher.errors import UsageProblem

IDENTITY = ("-c", "user.name=ddtree-patch", "-c", "user.email=ddtree-patch@localhost")
NO_SETTINGS = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}


def run(
    work: Path, *arguments: str, input: bytes = b"", index: Path | None = None, tree: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git on the repository in ``work``; with ``index`` and ``tree`` on these in place of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | NO_SETTINGS
    if index:
        environment["GIT_INDEX_FILE"] = str(index.absolute())
    there = (str(tree), f"--git-dir={(work / '.git').absolute()}", "--work-tree=.") if tree else (str(work),)
    command = ["git", "-C", *there, *IDENTITY, *arguments]
    try:
        return subprocess.run(command, input=input, capture_output=True, env=environment, check=False)
    except FileNotFoundError as error:
        raise UsageProblem("git is not installed on this machine", next_step="install git") from error


def git(work: Path, *arguments: str, input: bytes = b"", index: Path | None = None, tree: Path | None = None) -> bytes:
    """What git prints; raises UsageProblem with its words if it fails."""
    done = run(work, *arguments, input=input, index=index, tree=tree)
    if done.returncode:
        raise UsageProblem(
            f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}",
            where=str(work),
            next_step="make the work tree with ddtree-patch fork init",
        )
    return done.stdout


def commit_all(work: Path, message: str) -> None:
    """Commit everything that is in the work tree."""
    # --force: the release may hold files that its own .gitignore names.
    git(work, "add", "--all", "--force", ".")
    git(work, "commit", "--quiet", "--no-verify", "--allow-empty", "--file=-", input=message.encode())
