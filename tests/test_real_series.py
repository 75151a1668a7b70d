"""The series in patches/ against the release that each is made for."""

from __future__ import annotations

from pathlib import Path

from builders import inspection

from patcher import udiff_parse
from patcher.plan import make_plan, make_revert_plan
from patcher.series import catalogue, check_against, choose

PACKAGE = Path(__file__).resolve().parent.parent / "patches"


def test_the_series_gives_the_listed_bytes_from_the_real_wheel(unpacked_wheel):
    series = choose(catalogue(PACKAGE), "sglang", "0.5.11")
    assert [stage.name for stage in series.stages] == ["ddtree", "temperature"]
    pristine = {path: read(unpacked_wheel / path) for path in series.files}
    check_against(series, pristine)
    for stage in series.stages:
        plan = make_plan(series, stage.name, inspection(unpacked_wheel, series.files))
        assert plan.stage_from == "pristine"
        shown = {file.path: file for file in udiff_parse.parse(plan.unified_diff(), "plan")}
        assert set(shown) == {action.path for action in plan.changes}
    assert make_revert_plan(inspection(unpacked_wheel, series.files), series).is_noop


def test_no_patch_touches_the_line_ends_or_leaves_trailing_space():
    for series in catalogue(PACKAGE):
        for patch in series.patches:
            for file in patch.files:
                added = [text for hunk in file.hunks for tag, text in hunk.lines if tag == b"+"]
                assert not [text for text in added if b"\r" in text or text.rstrip() != text.removesuffix(b"\n")]
                assert all(text.endswith(b"\n") for text in added), file.path


def read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
