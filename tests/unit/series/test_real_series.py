"""The series in patches/ against the release that each is made for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from patcher.plan.make import make_plan, make_revert_plan
from patcher.series import udiff_parse
from patcher.series.catalogue import check_against
from patcher.series.model import Series
from patcher.series.refresh import unused
from patcher.series.versions import choose
from patcher.shipped import shipped
from scripts.rig.releases import Release
from tests.support import releases
from tests.support.builders import inspection


@pytest.mark.parametrize("release", releases.ALL)
def test_the_series_gives_the_listed_bytes_from_the_real_wheel(release):
    series = choose(releases.SERIES, "sglang", release.version)
    assert [stage.name for stage in series.stages] == ["greedy", "sampling"]
    check_against(series, releases.pristine_files(release, series.files))


@pytest.mark.parametrize("release", releases.ONE_A_SERIES)
def test_a_plan_is_the_diff_that_it_shows(release, tmp_path):
    series = choose(releases.SERIES, "sglang", release.version)
    tree = unpacked(release, series, tmp_path)
    for stage in series.stages:
        plan = make_plan(series, stage.name, inspection(tree, series.files))
        assert plan.stage_from == "pristine"
        shown = {file.path: file for file in udiff_parse.parse(plan.unified_diff(), "plan")}
        assert set(shown) == {action.path for action in plan.changes}
    assert make_revert_plan(inspection(tree, series.files), series).is_noop


@pytest.mark.parametrize("stage", ["greedy", "sampling"])
@pytest.mark.parametrize("release", releases.ONE_A_SERIES)
def test_what_a_stage_imports_from_its_own_files_is_defined_there(release, stage, tmp_path):
    """An import check on a host finds this, too, but a tree without interpreter, such as an image build, has none."""
    series = choose(releases.SERIES, "sglang", release.version)
    plan = make_plan(series, stage, inspection(unpacked(release, series, tmp_path), series.files))
    trees = {action.path: ast.parse(action.new) for action in plan.changes}
    imported = 0
    for path, tree in trees.items():
        for node in ast.walk(tree):
            own = f"{node.module.replace('.', '/')}.py" if isinstance(node, ast.ImportFrom) and node.module else ""
            if own in trees:
                wanted = {alias.name for alias in node.names}
                imported += len(wanted)
                assert wanted <= names_of(trees[own]), (path, own)
    assert imported > 20


@pytest.mark.parametrize("series", releases.SERIES, ids=lambda series: series.name)
def test_the_patch_names_the_files_that_its_identity_is_made_from(series):
    """As ddtree-patch counts them: those of the whole series that exist at the stage, patched there or not yet."""
    path = "sglang/srt/speculative/ddtree_patched_files.py"
    for stage in series.stages:
        told = {}
        exec(series.render(path, None, stage.name), told)
        assert told["PATCH_STAGE"] == stage.name
        assert told["PATCHED_FILES"] == tuple(sorted(one for one in series.files if series.sha256(one, stage.name)))


def names_of(tree: ast.Module) -> set[str]:
    """What a module has at its top level, also within `if` and `try`."""
    names: set[str] = set()
    left = list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)
        left += ast.iter_child_nodes(node)
    return names


def test_each_shared_patch_is_of_a_series():
    assert unused(shipped("patches"), releases.SERIES) == []


def test_no_patch_touches_the_line_ends_or_leaves_trailing_space():
    for series in releases.SERIES:
        for patch in series.patches:
            for file in patch.files:
                added = [text for hunk in file.hunks for tag, text in hunk.lines if tag == b"+"]
                assert not [text for text in added if b"\r" in text or text.rstrip() != text.removesuffix(b"\n")]
                assert all(text.endswith(b"\n") for text in added), file.path


@pytest.mark.parametrize("series", releases.SERIES, ids=lambda series: series.name)
def test_a_release_adds_little_to_the_core(series):
    """What a release needs of its own is what has to be carried to the next one by hand."""
    own = [patch for patch in series.patches if not patch.shared]
    added = [line for patch in own for file in patch.files for hunk in file.hunks for line in hunk.lines]
    assert sum(tag == b"+" for tag, _ in added) <= 450


def unpacked(release: Release, series: Series, directory: Path) -> Path:
    """A tree with the pristine files of the series."""
    for path, data in releases.pristine_files(release, series.files).items():
        if data is not None:
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(data)
    return directory
