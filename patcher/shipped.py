"""The directories that ship with the tool: series and smoke suites."""

from pathlib import Path


def shipped(name: str) -> Path:
    """A top-level directory of the repository ("patches", "configs"): of the checkout, or as a wheel installed it."""
    here = Path(__file__).resolve().parent
    installed = here / "data" / name
    return installed if installed.is_dir() else here.parent / name
