"""The steps of a commit, by name."""

from __future__ import annotations

import collections
import os
import signal

# In order. Those marked n happen once a file.
STEPS = (
    "lock",  # taken; a dead holder's lock is taken over
    "check",  # old hashes, syntax, mounts, permissions: all that can be refused, before anything is written
    "backup",  # old bytes, by content, into the state directory
    "journal",  # what is about to happen; from here on a death is undone
    "write",  # n: the new file beside the old one
    "keep",  # every old inode gets a second name, so that putting it back needs no space and loses nothing
    "rename",  # n: the new file takes the path
    "record",  # the distribution's RECORD, the same way
    "bytecode",  # compiled files of the old sources are removed
    "compile",  # and those of the new ones written
    "import",  # the named modules import in a fresh interpreter
    "read-back",  # every file is what it should be
    "stage",  # receipt and history, beside their places: what follows the decision needs no space
    "decide",  # the journal says "committed"; from here on a death is finished
    "receipt",
    "history",
    "clean",  # old inodes and backups that nothing needs any more
    "drop",  # the journal is gone
    "unlock",
)
UNDO = "undo"  # n: one file is put back; before a decision, these come in place of what remains of the list
UNDONE = "undone"  # every file is back: now the bytecode, and the journal goes

# Where tests end or stop the agent: <step>[:n], n counting from 1.
_SEAMS = {"DDTREE_AGENT_DIE_AT": signal.SIGKILL, "DDTREE_AGENT_STOP_AT": signal.SIGSTOP}
_seen: collections.Counter[str] = collections.Counter()


def step(name: str) -> None:
    """Mark that a step begins."""
    _seen[name] += 1
    for variable, signal_number in _SEAMS.items():
        wanted, _, number = os.environ.get(variable, "").partition(":")
        if wanted == name and _seen[name] == int(number or 1):
            os.kill(os.getpid(), signal_number)
