"""Run by the target venv's Python (see ../test_inside_v2.py): family v2 is imported, no server."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20261201)
