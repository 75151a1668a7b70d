"""Applying diffs against two oracles, GNU patch and git, on bytes; and what a strict engine must refuse."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patcher.errors import Conflict, SeriesProblem
from patcher.series import udiff
from patcher.series.udiff_parse import parse

PATH = "sglang/x.py"
A = b"a\nb\nc\nd\ne\nf\ng\n"
H = b"@@ -2,3 +2,3 @@\n b\n-c\n+C\n d\n"
FIT = b"--- a/sglang/x.py\n+++ b/sglang/x.py\n" + H
oracle_settings = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

ENVIRONMENT = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
# Few distinct lines make repeated context likely; \r, \f, NEL and lone bytes are lines' contents and no line ends.
line = st.sampled_from(
    [
        b"a",
        b"b",
        b"",
        b"    return",
        b"-",
        b"+x",
        b"-- ",
        b"@@ -1 +1 @@",
        b"\\ No",
        b"x\r",
        b"\f",
        b"\xff",
        b"\xc2\x85",
        b" ",
    ]
)
lines = st.lists(line, max_size=14)


@st.composite
def contents(draw):
    """A file's bytes, sometimes without the last line end."""
    text = b"".join(one + b"\n" for one in draw(lines))
    return text[:-1] if text and draw(st.booleans()) else text


@st.composite
def edits(draw):
    """(old, new): a file and itself with a few pieces replaced."""
    old = draw(contents())
    new = udiff.split_lines(old)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(new)))
        new[at : at + draw(st.integers(0, 3))] = [one + b"\n" for one in draw(st.lists(line, max_size=3))]
    text = b"".join(new)
    return old, text[:-1] if text and draw(st.booleans()) else text


@given(edits())
@oracle_settings
def test_round_trip_of_each_producer(pair):
    old, new = pair
    if old == new:
        return
    for producer in (udiff.make, made_by_git_no_index):
        (patch,) = parse(producer(PATH, old, new), producer.__name__)
        assert patch.path == PATH
        assert udiff.apply(patch, old) == new
        assert udiff.apply(udiff.reverse(patch), new) == old


@given(edits(), contents())
@oracle_settings
def test_what_is_accepted_equals_both_oracles(pair, other):
    """Also on a file for which the diff was not made: then it is mostly refused, and if not, all three must agree."""
    old, new = pair
    if old == new:
        return
    raw = made_by_git_no_index(PATH, old, new)
    (patch,) = parse(raw, "generated")
    for target in (old, new, other, old + b"more\n", b"first\n" + old):
        try:
            ours = udiff.apply(patch, target)
        except Conflict:
            continue
        if target and old:  # GNU patch refuses, or removes, files that are or become empty by rules of its own
            assert applied_by_patch(raw, target) in (ours, None if ours == b"" else ours)
        assert applied_by_git(raw, target) == ours


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_no_patch(raw):
    with pytest.raises(SeriesProblem):
        parse(raw, "random")


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_patch_is_refused_or_still_exact(data):
    """A byte or a line lost, doubled or changed never ends in anything but an answer or a typed error."""
    raw = bytearray(FIT)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=3))
    try:
        for patch in parse(bytes(raw), "damaged"):
            udiff.apply(patch, A)
    except (SeriesProblem, Conflict):
        pass


def test_drift_names_file_hunk_line_expected_and_found():
    (patch,) = parse(FIT, "H")
    with pytest.raises(Conflict) as caught:
        udiff.apply(patch, A.replace(b"c\n", b"c2\n"))
    assert str(caught.value) == "sglang/x.py: hunk 1 does not fit at line 3: expected 'c', found 'c2'"


def test_neither_forward_nor_reverse_is_a_conflict():
    (patch,) = parse(FIT, "H")
    drifted = A.replace(b"c\n", b"zzz\n")
    for one in (patch, udiff.reverse(patch)):
        with pytest.raises(Conflict):
            udiff.apply(one, drifted)


def test_repeated_context_is_not_applied_to_the_nearest(tmp_path):
    block = b"def f():\n    x = 1\n    return x\n\n"
    old = b"# top\n" + 3 * block
    new = old[: 1 * 6 + 2 * len(block)] + block.replace(b"1", b"2")
    raw = made_by_git(PATH, old, new)
    drifted = b"".join(b"# %d\n" % n for n in range(6)) + old
    (patch,) = parse(raw, "repeated")
    with pytest.raises(Conflict):
        udiff.apply(patch, drifted)
    # Both tools put it somewhere.
    assert applied_by_patch(raw, drifted) and applied_by_git(raw, drifted)


def test_a_hunk_at_the_end_fits_only_there():
    raw = b"--- a/sglang/x.py\n+++ b/sglang/x.py\n@@ -1,2 +1,3 @@\n a\n b\n+c\n"
    (patch,) = parse(raw, "insertion")
    assert udiff.apply(patch, b"a\nb\n") == b"a\nb\nc\n"
    with pytest.raises(Conflict, match="ends the file at line 2, the file has 3 lines"):
        udiff.apply(patch, b"a\nb\nb\n")
    with pytest.raises(Conflict, match="expected 'b', found 'b' without a line end"):
        udiff.apply(patch, b"a\nb")


@pytest.mark.parametrize(
    ("raw", "line_number", "said"),
    [
        (FIT.replace(b"+2,3", b"+2,6"), 7, "shorter"),
        (FIT.replace(b"-2,3 +2,3", b"-2,2 +2,2"), 7, "not as git"),
        (FIT.replace(b"-2,3 +2,3", b"-2,3 +5,3"), 3, "contradict"),
        (FIT.replace(b"-2,3", b"-0,3"), 3, "line 0"),
        (FIT + H, 8, "wrong order"),
        (FIT + FIT, 9, "twice"),
        (FIT + FIT.replace(b"x.py", b"x.py/y.py"), 14, "a file and a directory"),
        (FIT[:-1], 7, "cut off"),
        (FIT[:-2], 7, "cut off"),
        (FIT.replace(b"\n", b"\r\n"), 3, "\\r\\n"),
        (FIT.replace(b".py\n", b".py\r\n", 1), 2, "\\r"),
        (FIT + b"-- \n2.39.5\n\n" + FIT, 12, "not supported"),
        (FIT + b"rubbish\n", 8, "not as git"),
        (FIT + b"+more\n", 8, "not as git"),
        (FIT + b"\n", 8, "behind"),
        (FIT.replace(b"-c", b"?c"), 5, "not a valid"),
        (FIT.replace(b" b\n-c\n+C\n d\n", b" b\n c\n d\n"), 2, "changes nothing"),
        (b"--- a/sglang/x.py\n" + H, 2, ""),
        (b"--- a/sglang/x.py\n+++ b/sglang/x.py\n", 1, "not as git"),
        (H, 1, "without the file's header"),
        (FIT.replace(b"@@ -2,3 +2,3 @@\n b\n", b"@@ -3,2 +3,2 @@\n"), 3, "less context above"),
        (
            FIT.replace(b" d\n", b" d\n\\ No newline at end of file\n\\ No newline at end of file\n"),
            9,
            "not understood",
        ),
        (FIT.replace(b" b\n", b" b\n\\ No newline at end of file\n"), 6, "marked as the file's last"),
        (FIT.replace(b"-c\n", b"-c\n\\ Kein Zeilenumbruch\n"), 6, "not understood"),
        (FIT.replace(b"-2,3", b"-%s,3" % (b"9" * 5000)), 3, "not a valid"),
        (b"diff --git a/sglang/x.py b/sglang/x.py\nnew file mode 100644", 2, "cut off"),
    ],
)
def test_corrupt_text_is_refused_with_its_line(raw, line_number, said):
    with pytest.raises(SeriesProblem) as caught:
        parse(raw, "0001-x.patch")
    assert caught.value.where == f"0001-x.patch, line {line_number}"
    assert said in caught.value.what


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\n",
        b"<html><body>Not found</body></html>\n",
        b"3c\nC\n.\n",
        b"just words",
        b"*** a/x.py\n--- b/x.py\n***************\n*** 1 ****\n! c\n--- 1 ----\n! C\n",
    ],
)
def test_what_is_no_unified_diff_is_refused(raw):
    with pytest.raises(SeriesProblem):
        parse(raw, "not a patch")


@pytest.mark.parametrize(
    "path",
    [
        b"../evil.py",
        b"sglang/../../evil.py",
        b"/etc/passwd",
        b"sglang//x.py",
        b"sglang/./x.py",
        b"sglang/x\\y.py",
        b"sglang/" + 241 * b"n",
        b"",
        b".git/hooks/post-checkout",
        b"sglang/x.py\x01",
    ],
)
def test_unsafe_paths_are_refused(path):
    for raw in (
        FIT.replace(PATH.encode(), path),
        b"--- /dev/null\n+++ b/%s\n@@ -0,0 +1 @@\n+x\n" % path,
        b"--- %s\n+++ %s\n" % (path, path) + H,
    ):
        with pytest.raises(SeriesProblem):
            parse(raw, "hostile")


GIT = b"diff --git a/sglang/x.py b/sglang/x.py\n"
ADDED = b"--- /dev/null\n+++ b/sglang/x.py\n@@ -0,0 +1 @@\n+t\n"
RENAMED = GIT.replace(b"b/sglang/x", b"b/sglang/y") + b"similarity index 100%\nrename from sglang/x.py\n"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (GIT + b"old mode 100644\nnew mode 100755\n", "not supported"),
        (GIT + b"old mode 100644\nnew mode 100755\nindex 1..2\n" + FIT, "not supported"),
        (GIT + b"new file mode 120000\nindex 0000000..1de5659\n" + ADDED, "not supported"),
        (GIT + b"new file mode 160000\nindex 0000000..1de5659\n" + ADDED, "not supported"),
        (GIT + b"index 1de5659..2de5659 160000\n" + FIT, "not supported"),
        (GIT + b"new file mode 100755\nindex 0000000..e69de29\n", "not supported"),
        (GIT + b"index 1..2\nBinary files a/sglang/x.py and b/sglang/x.py differ\n", "not supported"),
        (b"Binary files a/sglang/x.py and b/sglang/x.py differ\n", "no change"),
        (GIT + b"index 1..2\nGIT binary patch\nliteral 1\nIcmZ\n", "not supported"),
        (RENAMED, "not supported"),
        (FIT.replace(b"b/sglang/x", b"b/sglang/y"), "rename"),
        (GIT.replace(b"x.py", b"y.py") + FIT, ""),
        (GIT, "without any hunk"),
        (GIT + b"new file mode 100644\nindex 0..1\n" + FIT, "not as git"),
        (b"--- /dev/null\n+++ /dev/null\n@@ -0,0 +1 @@\n+x\n", ""),
        (b"--- /dev/null\n+++ b/sglang/x.py\n" + H, "does not create"),
        (b"--- a/sglang/x.py\n+++ /dev/null\n" + H, "does not delete"),
        (FIT.replace(b"--- a/", b"--- old/").replace(b"+++ b/", b"+++ new/"), "not a/"),
    ],
)
def test_what_is_no_plain_change_of_text_is_refused(raw, said):
    with pytest.raises(SeriesProblem) as caught:
        parse(raw, "0001-x.patch")
    assert said in caught.value.what


@pytest.mark.parametrize(
    "raw",
    [
        FIT,
        b"From: someone\nSubject: H\n\n---\n sglang/x.py | 2 +-\n\n" + GIT + b"index 1..2 100644\n" + FIT,
        FIT.replace(b"@@ -2,3 +2,3 @@", b"@@ -2,3 +2,3 @@ class Section:"),
        b'--- "a/sglang/x.py"\n+++ "b/sglang/\\170.py"\n' + H,
    ],
)
def test_odd_headers_that_are_right(raw):
    (patch,) = parse(raw, "odd")
    assert (patch.path, patch.kind) == (PATH, "modify")
    assert udiff.apply(patch, A) == A.replace(b"c", b"C")


@pytest.mark.parametrize(
    "raw",
    [
        FIT + b"-- \n2.39.5\n\n",
        FIT + b"\n\n",
        b"--- sglang/x.py\n+++ sglang/x.py\n" + H,
        b"--- i/sglang/x.py\n+++ w/sglang/x.py\n" + H,
        b"diff --git i/sglang/x.py w/sglang/x.py\n--- i/sglang/x.py\n+++ w/sglang/x.py\n" + H,
        b"diff --git sglang/x.py sglang/x.py\n--- sglang/x.py\n+++ sglang/x.py\n" + H,
        b"--- a/sglang/x.py\t2026-01-02 03:04:05.678901234 +0100\n+++ b/sglang/x.py\t2026-01-02 03:04:06 +0100\n" + H,
        b"--- a/sglang/x.py 2026-01-02 03:04:05.678901234 +0100\n+++ b/sglang/x.py 2026-01-02 03:04:06\n" + H,
        FIT.replace(b"@@ -2,3 +2,3 @@", b"@@ -02,3 +2,3 @@"),
        b"--- a/sglang/x.py\n+++ b/sglang/x.py\n@@ -1,4 +1,4 @@\n a\n\n-c\n+C\n d\n",  # a blank line without its space
    ],
)
def test_what_export_does_not_write_says_how_to_bring_it_in(raw):
    """Patches of other tools, of mailers and of people: git brings them into a work tree, export writes them."""
    with pytest.raises(SeriesProblem) as caught:
        parse(raw, "by-hand.patch")
    assert "fork export" in caught.value.next_step


def test_line_ends_must_be_those_of_the_file():
    (patch,) = parse(FIT, "LF")
    with pytest.raises(Conflict, match=r"expected 'b', found 'b\\r'"):
        udiff.apply(patch, A.replace(b"\n", b"\r\n"))
    crlf = A.replace(b"\n", b"\r\n")
    (patch,) = parse(made_by_git(PATH, crlf, crlf.replace(b"c", b"C")), "CRLF file")
    assert udiff.apply(patch, crlf) == crlf.replace(b"c", b"C")
    with pytest.raises(Conflict):
        udiff.apply(patch, A)


@pytest.mark.parametrize("path", ["sglang/größe.py", "sglang/a b.py", 'sglang/"q".py'])
def test_names_that_git_quotes(path):
    for producer in (udiff.make, made_by_git):
        for old, new in ((A, b"c\n"), (None, b"x\n"), (b"x\n", None), (None, b"")):
            (patch,) = parse(producer(path, old, new), producer.__name__)
            assert patch.path == path
            assert udiff.apply(patch, old) == new


def test_a_name_that_could_end_in_two_places_is_refused():
    with pytest.raises(SeriesProblem):
        parse(udiff.make("sglang/ b/c.py", A, b"c\n"), "ambiguous")


def test_unquoted_non_ascii_names():
    assert parse(FIT.replace(b"x.py", "größe.py".encode()), "raw")[0].path == "sglang/größe.py"
    with pytest.raises(SeriesProblem, match="UTF-8"):
        parse(FIT.replace(b"x.py", "größe.py".encode("latin-1")), "raw")


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (None, b"", "create"),
        (b"", None, "delete"),
        (None, b"x", "create"),
        (b"x\n", None, "delete"),
        (b"", b"x\n", "modify"),
        (b"x\n", b"", "modify"),
    ],
)
def test_empty_and_absent_are_two_things(old, new, kind):
    for producer in (udiff.make, made_by_git):
        (patch,) = parse(producer(PATH, old, new), producer.__name__)
        assert patch.kind == kind
        assert udiff.apply(patch, old) == new
        for wrong in {None, b"", b"other\n"} - {old}:
            with pytest.raises(Conflict):
                udiff.apply(patch, wrong)


def test_a_removal_that_would_leave_lines_is_a_conflict():
    (patch,) = parse(udiff.make(PATH, b"x\n", None), "removal")
    with pytest.raises(Conflict, match="the file has 2 lines"):
        udiff.apply(patch, b"x\ny\n")
    (patch,) = parse(udiff.make(PATH, b"", None), "removal")
    with pytest.raises(Conflict, match="this one has 1 lines"):
        udiff.apply(patch, b"y\n")


def made_by_git(path: str, old: bytes | None, new: bytes | None) -> bytes:
    """What git diff says, in a fresh repository of its own."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        git(root, "init", "-q")
        (root / path).parent.mkdir(parents=True)
        if old is not None:
            (root / path).write_bytes(old)
            git(root, "add", "-A")
        if new is None:
            (root / path).unlink()
        else:
            (root / path).write_bytes(new)
            git(root, "add", "-N", ".")
        return git(root, "diff", "--text", "--no-renames")


def made_by_git_no_index(path: str, old: bytes, new: bytes) -> bytes:
    """The same, from two folders."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for side, data in (("a", old), ("b", new)):
            (root / side / path).parent.mkdir(parents=True)
            (root / side / path).write_bytes(data)
        command = ["git", "diff", "--no-index", "--no-prefix", "--text", f"a/{path}", f"b/{path}"]
        done = subprocess.run(command, cwd=root, capture_output=True, check=False, env=ENVIRONMENT)
        assert done.returncode == 1, done.stderr
        return done.stdout


def applied_by_patch(raw: bytes, target: bytes) -> bytes | None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / PATH
        file.parent.mkdir()
        file.write_bytes(target)
        command = ["patch", "-F0", "-p1", "--binary", "--force", "--no-backup-if-mismatch", "-s"]
        done = subprocess.run(command, cwd=directory, input=raw, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout
        return file.read_bytes() if file.exists() else None


def applied_by_git(raw: bytes, target: bytes) -> bytes | None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / PATH
        file.parent.mkdir()
        file.write_bytes(target)
        git(Path(directory), "apply", "--whitespace=nowarn", "-", input=raw)
        return file.read_bytes() if file.exists() else None


def git(root: Path, *arguments: str, input: bytes = b"") -> bytes:
    """git without the user's settings, and blind to any repository above the scratch directory."""
    environment = ENVIRONMENT | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    return subprocess.run(
        ["git", *arguments], cwd=root, input=input, capture_output=True, check=True, env=environment
    ).stdout
