"""Plans over synthetic packages: from every known state, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from patcher.errors import Conflict, Drift, Locked
from patcher.plan.make import make_plan, make_revert_plan
from patcher.plan.plan import Plan
from patcher.series import udiff_parse
from patcher.series.udiff import apply
from patcher.wire.types import Holder
from tests.support.builders import DDTREE, PRISTINE, STAGES, files_after, inspection, make_package, make_series

ARGS, INFO, NEW, WORKER = "sglang/srt/args.py", "sglang/srt/info.py", "sglang/srt/ddtree.py", "sglang/srt/worker.py"
PATHS = (ARGS, INFO, NEW, WORKER)
STATES = ("pristine", *STAGES)


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    return make_series(tmp_path_factory.mktemp("catalogue") / "sglang-0.5.11")


def test_the_files_of_the_series(series):
    assert set(series.files) == set(PATHS)


@pytest.mark.parametrize("end", STAGES)
@pytest.mark.parametrize("start", STATES)
def test_apply_from_every_known_state(series, tmp_path, start, end):
    root = make_package(tmp_path, files_after(start))
    plan = make_plan(series, end, inspection(root, PATHS))
    assert (plan.stage_from, plan.stage_to) == (start, end)
    assert bool(plan.changes) == (start != end)
    execute(plan, root)
    assert read(root) == only(files_after(end))


@pytest.mark.parametrize("stage", STAGES)
def test_again_is_a_no_op_and_revert_gives_every_byte_back(series, tmp_path, stage):
    root = make_package(tmp_path)
    before = read(root)
    plan = make_plan(series, stage, inspection(root, PATHS))
    assert not plan.is_noop
    execute(plan, root)
    receipt = json.loads(json.dumps(plan.receipt())) | {"when": "now", "by": "someone"}
    again = make_plan(series, stage, inspection(root, PATHS, receipt))
    assert again.is_noop and again.request() == []
    revert = make_revert_plan(inspection(root, PATHS, receipt, backups=present(before)), series)
    assert not revert.is_noop and revert.receipt() is None
    assert all(action.from_backup for action in revert.changes if action.after)
    execute(revert, root)
    assert read(root) == before
    assert make_revert_plan(inspection(root, PATHS), series).is_noop


def test_a_later_stage_keeps_the_first_origin(series, tmp_path):
    root = make_package(tmp_path)
    first = make_plan(series, "ddtree", inspection(root, PATHS))
    execute(first, root)
    second = make_plan(series, "temperature", inspection(root, PATHS, first.receipt()))
    assert [action.path for action in second.changes] == [INFO, WORKER]
    origins = {path: row["before"] for path, row in second.receipt()["files"].items()}
    assert origins == {path: sha(PRISTINE[path]) for path in PATHS}


def test_partly_applied_by_hand_is_completed_when_every_hash_is_known(series, tmp_path):
    root = make_package(tmp_path, PRISTINE | {ARGS: DDTREE[ARGS]})
    plan = make_plan(series, "ddtree", inspection(root, PATHS))
    assert plan.stage_from == "mixed"
    assert {action.path: action.kind for action in plan.actions} == {
        ARGS: "already",
        INFO: "already",
        NEW: "create",
        WORKER: "modify",
    }
    assert {action.path: action.state for action in plan.actions}[WORKER] == "pristine"


def test_half_fits_then_nothing_is_planned(series, tmp_path):
    root = make_package(tmp_path, PRISTINE | {WORKER: PRISTINE[WORKER].replace(b"return 5", b"return 55")})
    with pytest.raises(Drift) as caught:
        make_plan(series, "ddtree", inspection(root, PATHS))
    assert caught.value.exit_code == 4
    assert caught.value.where == f"{WORKER}:22"
    assert "hunk 1 of ddtree-all" in str(caught.value)
    assert "expected '    return 5', installed '    return 55'" in str(caught.value)


def test_all_applied_by_hand_needs_only_the_receipt(series, tmp_path):
    root = make_package(tmp_path, files_after("temperature"))
    plan = make_plan(series, "temperature", inspection(root, PATHS))
    assert plan.changes == () and not plan.is_noop
    assert plan.receipt()["files"][WORKER]["before"] == sha(PRISTINE[WORKER])
    # No backup can exist; the patches are reversed instead.
    revert = make_revert_plan(inspection(root, PATHS, plan.receipt()), series)
    execute(revert, root)
    assert read(root) == only(PRISTINE)


def test_a_tree_patched_by_hand_can_be_reverted_without_a_receipt(series, tmp_path):
    root = make_package(tmp_path, files_after("ddtree"))
    plan = make_revert_plan(inspection(root, PATHS), series)
    assert (plan.stage_from, plan.stage_to) == ("ddtree", "pristine")
    execute(plan, root)
    assert read(root) == only(PRISTINE)


@pytest.mark.parametrize(
    ("old", "new", "line", "expected", "installed", "place"),
    [
        (b"ARG_20 = 20", b"ARG_20 = 21", 21, "'ARG_20 = 20'", "'ARG_20 = 21'", "hunk 1 of ddtree-all"),
        (b"ARG_19 = 19", b"zzz", 20, "'ARG_19 = 19'", "'zzz'", "hunk 1 of ddtree-all"),
        (b"ARG_3 = 3\n", b"ARG_3 = 4\n", 4, "another line", "'ARG_3 = 4'", "outside of the lines"),
        (b"ARG_20 = 20\n", b"ARG_20 = 20\r\n", 21, "'ARG_20 = 20'", r"'ARG_20 = 20\r'", "hunk 1 of ddtree-all"),
        (b"ARG_1 = 1\n", b"", 2, "another line", "'ARG_2 = 2'", "outside of the lines"),
        (b"ARG_1 = 1\n", b"ARG_1 = 1\nmore\n", 3, "another line", "'more'", "outside of the lines"),
        (b"ARG_39 = 39\n", b"ARG_39 = 39\nmore\n", 41, "end of file", "'more'", "outside of the lines"),
        (b"ARG_39 = 39\n", b"ARG_39 = 39", 40, "another line", "without a line end", "outside of the lines"),
        (b"ARG_39 = 39\n", b"", 40, "another line", "end of file", "outside of the lines"),
    ],
)
def test_drift_names_the_first_differing_line(series, tmp_path, old, new, line, expected, installed, place):
    root = make_package(tmp_path, PRISTINE | {ARGS: PRISTINE[ARGS].replace(old, new, 1)})
    with pytest.raises(Drift) as caught:
        make_plan(series, "temperature", inspection(root, PATHS, record={ARGS: sha(PRISTINE[ARGS])}))
    assert caught.value.where == f"{ARGS}:{line}"
    text = str(caught.value)
    assert expected in text and installed in text and place in text and "edited since it was installed" in text


def test_drift_on_a_patched_file_is_compared_with_the_patched_one(series, tmp_path):
    files = files_after("temperature")
    root = make_package(tmp_path, files | {WORKER: files[WORKER].replace(b"return 9\n", b"return 10\n")})
    with pytest.raises(Drift) as caught:
        make_plan(series, "temperature", inspection(root, PATHS))
    assert "compared with temperature" in str(caught.value)
    assert caught.value.where == f"{WORKER}:38"


def test_files_that_someone_is_changing_are_no_drift(series, tmp_path):
    holder = Holder(who="ann@desk", host="gpu1", pid=7, since=1.7e9)
    moving = inspection(make_package(tmp_path, PRISTINE | {ARGS: b""}), PATHS, lock=holder)
    for make in (lambda: make_plan(series, "ddtree", moving), lambda: make_revert_plan(moving, series)):
        with pytest.raises(Locked, match="ann@desk"):
            make()


def test_all_drifted_files_are_named(series, tmp_path):
    root = make_package(tmp_path, PRISTINE | {ARGS: b"", WORKER: None})
    with pytest.raises(Drift) as caught:
        make_plan(series, "ddtree", inspection(root, PATHS))
    assert "2 files of sglang 0.5.11 are" in str(caught.value)
    assert f"{WORKER}: the file does not exist" in caught.value.detail and f"{ARGS}, line 1" in caught.value.detail


def test_another_build_of_the_distribution_is_called_that(series, tmp_path):
    other = b"# another build\n" + PRISTINE[ARGS]
    root = make_package(tmp_path, PRISTINE | {ARGS: other})
    with pytest.raises(Drift, match="another build"):
        make_plan(series, "ddtree", inspection(root, PATHS, record={ARGS: sha(other)}))


@pytest.mark.parametrize(
    ("there", "outcome"),
    [
        (DDTREE[NEW], "already"),
        (b"", "it is empty"),
        (b"mine\n", "not a version"),
        (DDTREE[NEW] + b"more\n", "line 3: expected end of file, installed 'more'"),
    ],
)
def test_a_new_file_that_exists_already(series, tmp_path, there, outcome):
    root = make_package(tmp_path, PRISTINE | {NEW: there})
    if outcome == "already":
        plan = make_plan(series, "ddtree", inspection(root, PATHS))
        assert {action.path: action.kind for action in plan.actions}[NEW] == "already"
    else:
        with pytest.raises(Drift, match=outcome):
            make_plan(series, "ddtree", inspection(root, PATHS))


def test_v2_over_v1(series, tmp_path):
    dropped = "sglang/srt/__init__.py"
    args_v1 = PRISTINE[ARGS].replace(b"ARG_20 = 20", b"ARG_20 = 'v1'")
    v1 = make_series(tmp_path / "v1", stages={"ddtree": {ARGS: args_v1, NEW: b"v1\n", dropped: b"v1 = 1\n"}})
    root = make_package(tmp_path / "site")
    paths = (*PATHS, dropped)
    first = make_plan(v1, "ddtree", inspection(root, paths))
    execute(first, root)
    backups = present({path: PRISTINE[path] for path in paths})
    seen = inspection(root, paths, first.receipt(), backups=backups)
    second = make_plan(series, "temperature", seen)
    assert second.stage_from == "an earlier series"
    execute(second, root)
    assert read(root) == only(files_after("temperature")) and (root / dropped).read_bytes() == b""
    assert {path: row["before"] for path, row in second.receipt()["files"].items()} == {
        path: sha(PRISTINE[path]) for path in PATHS
    }


def test_v2_over_v1_without_the_backups_is_refused(series, tmp_path):
    v1 = make_series(tmp_path / "v1", stages={"ddtree": {ARGS: PRISTINE[ARGS] + b"v1\n"}})
    root = make_package(tmp_path / "site")
    first = make_plan(v1, "ddtree", inspection(root, PATHS))
    execute(first, root)
    with pytest.raises(Drift):
        make_plan(series, "temperature", inspection(root, PATHS, first.receipt()))


def test_a_stale_receipt_is_never_reversed(series, tmp_path):
    root = make_package(tmp_path)
    receipt = make_plan(series, "ddtree", inspection(root, PATHS)).receipt() | {"version": "0.5.10"}
    stale = inspection(root, PATHS, receipt, receipt_state="stale")
    with pytest.raises(Conflict, match="stale"):
        make_revert_plan(stale, series)
    plan = make_plan(series, "ddtree", stale)
    assert plan.stage_from == "pristine" and not plan.is_noop


def test_revert_refuses_what_was_edited_after_the_apply(series, tmp_path):
    root = make_package(tmp_path, files_after("ddtree"))
    receipt = make_plan(series, "ddtree", inspection(root, PATHS)).receipt()
    (root / WORKER).write_bytes(DDTREE[WORKER] + b"edited\n")
    for known in (series, None):
        with pytest.raises(Drift, match=WORKER):
            make_revert_plan(inspection(root, PATHS, receipt), known)


def test_the_diff_of_a_plan_applies_to_the_installation(series, tmp_path):
    root = make_package(tmp_path)
    plan = make_plan(series, "temperature", inspection(root, PATHS))
    shown = {file.path: apply(file, PRISTINE[file.path]) for file in udiff_parse.parse(plan.unified_diff(), "plan")}
    assert shown == only(files_after("temperature"))


BLOCK = b"def f():\n    x = 1\n    return x\n\n"
TOP = b"".join(b"top %d\n" % n for n in range(20))
BOTTOM = b"".join(b"bottom %d\n" % n for n in range(40))
# One more block in the middle of many: symmetric, so it fits any number of times.
REPEATED = (
    b"--- a/sglang/srt/args.py\n+++ b/sglang/srt/args.py\n@@ -26,6 +26,10 @@\n     x = 1\n     return x\n \n"
    b"+def f():\n+    x = 1\n+    return x\n+\n def f():\n     x = 1\n     return x\n"
)


def test_a_hunk_that_fits_again_is_not_applied_again(tmp_path):
    states = [TOP + count * BLOCK + BOTTOM for count in (5, 6, 7)]
    patch = udiff_parse.parse(REPEATED, "repeated")[0]
    assert [apply(patch, state) for state in states[:2]] == states[1:]
    series = make_series(tmp_path / "series", {ARGS: states[0]}, {"ddtree": {ARGS: states[1]}})
    root = make_package(tmp_path / "site", {ARGS: states[1]})
    assert make_plan(series, "ddtree", inspection(root, [ARGS])).changes == ()
    (root / ARGS).write_bytes(states[2])
    with pytest.raises(Drift):
        make_plan(series, "ddtree", inspection(root, [ARGS]))


def test_a_hunk_that_fits_in_the_wrong_block_is_refused_for_the_hash(tmp_path):
    before, after = 3 * BLOCK, BLOCK.replace(b"1", b"2") + 3 * BLOCK
    old, new = TOP + before + BLOCK + 3 * BLOCK + BOTTOM, TOP + before + after + BOTTOM
    series = make_series(tmp_path / "series", {ARGS: old}, {"ddtree": {ARGS: new}})
    drifted = TOP + BLOCK + old[len(TOP) :]
    assert apply(series.patches[0].files[0], drifted) == TOP + before + after + BLOCK + BOTTOM
    root = make_package(tmp_path / "site", {ARGS: drifted})
    with pytest.raises(Drift):
        make_plan(series, "ddtree", inspection(root, [ARGS]))


def test_a_plan_is_plain_data(series, tmp_path):
    root = make_package(tmp_path)
    plan = make_plan(series, "temperature", inspection(root, PATHS))
    shown = json.loads(json.dumps(plan.as_dict()))
    assert [action["path"] for action in shown["actions"]] == sorted(PATHS)
    assert shown["identity"] == series.identity("temperature") and shown["noop"] is False
    assert plan.modules() == ["sglang.srt.args", "sglang.srt.ddtree", "sglang.srt.info", "sglang.srt.worker"]


def execute(plan: Plan, root: Path) -> None:
    """What the agent does with a plan, without any of its care."""
    for action in plan.changes:
        target = root / action.path
        assert sha(target.read_bytes() if target.exists() else None) == action.before
        if action.after is None:
            target.unlink()
            continue
        data = action.new if action.from_backup else action.data
        assert sha(data) == action.after
        target.write_bytes(data)


def read(root: Path) -> dict[str, bytes | None]:
    return {path: (root / path).read_bytes() if (root / path).exists() else None for path in PATHS}


def only(files: dict) -> dict:
    return {path: files[path] for path in PATHS}


def present(files: dict) -> dict:
    return {path: data for path, data in files.items() if data is not None}


def sha(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()
