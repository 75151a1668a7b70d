"""What these tests share."""

import pytest

from patcher.server import readiness


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub is ready within a second."""
    monkeypatch.setattr(readiness, "POLL_S", 0.3)
