"""Which module holds each operation; whoever sends the agent reads here what an operation needs.

An operation is a function of its own name. Data only: it is imported on the operator's side too.
"""

from __future__ import annotations

# On an installation, once what an earlier run left of a commit is undone or finished: function(site, request).
ON_A_SITE = {
    "inspect": "look",
    "forget": "look",
    "history": "look",
    "state": "look",
    "commit": "commit",
    "run_python": "programs",
    "recover": "recovered",
}
# On the host as a whole: function(request).
ON_THE_HOST = {"processes": "processes"}
ENTRY = "main"
SITE_ENTRY = "recovered"  # what stands between `main` and an operation on an installation


def modules_of(op: str) -> tuple[str, ...]:
    """The modules that an operation starts from, less what they import. Raises KeyError for no operation."""
    return (ENTRY, ON_THE_HOST[op]) if op in ON_THE_HOST else (ENTRY, SITE_ENTRY, ON_A_SITE[op])
