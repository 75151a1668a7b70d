"""Every series on the real wheel of every version that it names: stage by stage, and back, byte for byte."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from patcher.series.catalogue import catalogue
from patcher.series.model import Series
from patcher.series.versions import choose
from scripts.rig import target
from tests.support import releases
from tests.support.installations import hashes


@dataclass(frozen=True)
class Unpacked:
    """A wheel, unpacked, and the series for it."""

    series: Series
    tree: Path


@pytest.fixture(scope="module", params=releases.ALL)
def unpacked(request, tmp_path_factory):
    release = request.param
    tree = target.unpack_wheel(tmp_path_factory.mktemp("wheel") / "site-packages", release)
    yield Unpacked(choose(catalogue(), "sglang", release.version), tree)
    shutil.rmtree(tree)


def test_apply_again_each_stage_and_revert(unpacked, tool, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    series, tree = unpacked.series, unpacked.tree
    start = hashes(tree)
    options = ("--site-packages", tree, "--json")
    done = tool("apply", *options)
    assert done.code == 0, done.stderr
    patched, last = hashes(tree), series.stages[-1].name
    for name in series.files:
        assert patched.get(name) == series.sha256(name, last), name
    changed = {name for name, digest in patched.items() if start.get(name) != digest}
    assert all(
        name in series.files or name.startswith(".ddtree-patch/") or name.endswith("/RECORD") for name in changed
    )
    again = tool("apply", *options)
    assert again.code == 0 and again.host["plan"]["noop"] and hashes(tree) == patched
    for stage in series.stages:
        assert tool("apply", *options, "--up-to", stage.name).code == 0
        assert tool("status", *options).host["state"] == stage.name
    assert tool("verify", *options).code == 0
    assert tool("revert", *options).code == 0
    assert hashes(tree) == start


def test_another_release_is_left_alone(unpacked, tool, monkeypatch, tmp_path):
    """As a post-release, a nightly or a fork is: the version is none that a series names."""
    monkeypatch.chdir(tmp_path)
    (metadata,) = unpacked.tree.glob("sglang-*.dist-info/METADATA")
    released = metadata.read_bytes()
    start = hashes(unpacked.tree)
    version = unpacked.series.versions[0].encode()
    try:
        metadata.write_bytes(released.replace(b"\nVersion: ", b"\nVersion: 1!", 1))
        said = tool("apply", "--site-packages", unpacked.tree, "--json")
    finally:
        metadata.write_bytes(released)
    assert said.code == 4 and version.decode() in said.stdout
    assert hashes(unpacked.tree) == start
