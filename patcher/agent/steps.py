"""The steps of a commit, by name."""

from __future__ import annotations

import collections
import os
import signal

# In order. Those marked n happen once a file.
STEPS = (
    "lock",       # taken; a dead holder's lock is taken over
    "check",      # old hashes, syntax, mounts, permissions: all that can be refused, before anything is written
    "backup",     # old bytes, by content, into the state directory
    "journal",    # what is about to happen; from here on a death is undone
    "write",      # n: the new file beside the old one
    "rename",     # n: the old inode is kept under another name, then the new file takes the path
    "record",     # the distribution's RECORD, the same way
    "bytecode",   # compiled files of the old sources are removed
    "compile",    # and those of the new ones written
    "import",     # the named modules import in a fresh interpreter
    "read-back",  # every file is what it should be
    "decide",     # the journal says "committed"; from here on a death is finished
    "receipt",
    "history",
    "clean",      # old inodes and backups that nothing needs any more
    "drop",       # the journal is gone
    "unlock",
)
UNDO = "undo"  # n: one file is put back

_seen: collections.Counter[str] = collections.Counter()


def step(name: str) -> None:
    """Mark that a step begins. Tests kill the agent here: DDTREE_AGENT_DIE_AT=<step>[:n], n counting from 1."""
    _seen[name] += 1
    wanted, _, number = os.environ.get("DDTREE_AGENT_DIE_AT", "").partition(":")
    if wanted == name and _seen[name] == int(number or 1):
        os.kill(os.getpid(), signal.SIGKILL)
