"""support.toml: what a series says of where it works."""

from __future__ import annotations

from datetime import date

import pytest

from patcher.errors import SeriesProblem
from patcher.series.catalogue import ROOT_VARIABLE, load_series
from patcher.series.support import NOTHING
from tests.support.builders import make_series

PROOF = '[gpu]\ndate = 2026-11-30\nidentity = "{}"\nshown_by = "a page"\n'
HEAD = 'family = "v2"\nbackends = ["triton", "fa3"]\n'


@pytest.fixture
def directory(tmp_path):
    make_series(tmp_path / "sglang-0.5.11")
    return tmp_path / "sglang-0.5.11"


def test_a_series_without_it_says_nothing(directory):
    assert load_series(directory).support == NOTHING


def test_the_matrix(directory, tool, monkeypatch):
    monkeypatch.setenv(ROOT_VARIABLE, str(directory.parent))
    last = load_series(directory).identity("temperature")
    (directory / "support.toml").write_text(HEAD + PROOF.format(last))
    support = load_series(directory).support
    assert (support.family, support.backends, support.cpu) == ("v2", ("triton", "fa3"), None)
    assert support.gpu.date == date(2026, 11, 30)
    (listed,) = tool("list", "--json").json["series"]
    assert listed["family"] == "v2" and listed["identity"] == last and listed["proven"]["cpu"] is None
    assert listed["proven"]["gpu"] == {"date": "2026-11-30", "current": True, "shown_by": "a page"}
    said = tool("list")
    assert "2026-11-30" in said.stdout and "earlier text" not in said.stdout
    # The series was changed since.
    (directory / "support.toml").write_text(HEAD + PROOF.format("0" * 64))
    assert not tool("list", "--json").json["series"][0]["proven"]["gpu"]["current"]
    assert "earlier text" in tool("list").stdout


@pytest.mark.parametrize(
    "text",
    [
        "",
        "family = 1\nbackends = ['x']\n",
        "family = 'v1'\n",
        "family = 'v1'\nbackends = []\n",
        "family = 'v1'\nbackends = [1]\n",
        "family = 'v1'\nbackends = 'triton'\n",
        f"{HEAD}more = 1\n",
        f"{HEAD}gpu = 1\n",
        f"{HEAD}[tpu]\n",
        f"{HEAD}[gpu]\n",
        HEAD + PROOF.format("0" * 63),
        HEAD + PROOF.format("0" * 64).replace("2026-11-30", '"2026-11-30"'),
        HEAD + PROOF.format("0" * 64).replace("2026-11-30", "2026-11-30T10:00:00"),
        HEAD + PROOF.format("0" * 64).replace('"a page"', '""'),
        HEAD + PROOF.format("0" * 64) + "more = 1\n",
        "family = \n",
        "\udcff",
        f"x = {'[' * 5000}",
    ],
)
def test_what_it_cannot_mean(directory, text):
    (directory / "support.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SeriesProblem) as caught:
        load_series(directory)
    assert str(directory / "support.toml") == caught.value.where
