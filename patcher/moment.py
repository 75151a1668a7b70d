"""Times of a host, for a reader."""

import datetime


def local_time(when: float) -> str:
    """A host's unix time in this machine's time zone."""
    return datetime.datetime.fromtimestamp(when).astimezone().isoformat(sep=" ", timespec="seconds")
