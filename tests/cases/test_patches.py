"""Cases 1 to 13: patches as they come, and the files that they find."""

import gzip
import os
import select
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packages import PATCHED, A, H, Tree, X, Y, contents, patch_of, refused_at_load, sign, told

from patcher.shipped import shipped
from tests.support.builders import VERSION

BOTH = patch_of(X, Y)
one_tree = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize(
    ("data", "line", "expected", "installed", "hunk"),
    [
        (A.replace(b"c\n", b"c2\n"), 3, "'c'", "'c2'", True),
        (A.replace(b"c\n", b"zzz\n"), 3, "'c'", "'zzz'", True),
        (A.replace(b"b\n", b"b \n"), 2, "'b'", "'b '", True),
        (A.replace(b"d\n", b"d\r\n"), 4, "'d'", r"'d\r'", True),
        (A.replace(b"\n", b"\r\n"), 1, "another line", r"'a\r'", True),
        (b"\xef\xbb\xbf" + A, 1, "another line", r"'\ufeffa'", False),
        (A.replace(b"c\n", b"new\nc\n"), 3, "'c'", "'new'", True),
        (A.replace(b"c\n", b""), 3, "'c'", "'d'", True),
        (A.replace(b"f\n", b"F\n"), 6, "another line", "'F'", False),
        (A.removesuffix(b"\n"), 7, "another line", "'g' without a line end", False),
        (A + b"h\n", 8, "end of file", "'h'", False),
        (b"", 1, "another line", "end of file", True),
        (None, 0, "", "does not exist", False),
    ],
)
def test_case_01_drift(tree, tool, data, line, expected, installed, hunk):
    """`line`, `expected`, `installed`: the first that differs. `hunk`: whether the piece that differs is the hunk's."""
    tree.sign(BOTH)
    if data is None:
        (tree.site / X).unlink()
    else:
        tree.write(X, data)
    before = tree.everything()
    error = told(tool("apply", *tree.options), 4, X, "sglang 0.5.11")
    assert error["error"] == "Drift"
    if line:
        assert f"{X}, line {line}: expected {expected}, installed {installed}" in error["what"]
        assert error["where"] == f"{X}:{line}" and Y not in error["what"]
        assert ("in hunk 1 of all-all" in error["what"]) is hunk, error["what"]
    else:
        assert installed in error["what"]
    assert tree.everything() == before


def test_case_01_drift_in_text(tree, tool):
    """What a person reads without --json: the same, on stderr."""
    tree.sign(BOTH)
    tree.write(X, A.replace(b"c\n", b"c2\n"))
    said = tool("apply", "--site-packages", tree.site)
    assert said.code == 4 and f"where: {X}:3" in said.stderr and "next: " in said.stderr
    assert "expected 'c', installed 'c2'" in " ".join(said.stderr.split())


@pytest.mark.parametrize("carried", [X, Y])
def test_case_02_partly_applied(tree, tool, carried):
    tree.sign(BOTH)
    start = {X: A, Y: A}
    tree.write(carried, PATCHED)
    found = {file["path"]: file["state"] for file in tool("status", *tree.options).host["files"]}
    other = Y if carried == X else X
    assert found == {carried: "all", other: "pristine"}
    done = tool("apply", *tree.options)
    assert {action["path"]: action["kind"] for action in done.host["plan"]["actions"]} == {
        carried: "already",
        other: "modify",
    }
    assert done.code == 0 and "skipped" not in done.host["summary"] and "1 as they should be" in done.host["summary"]
    assert [tree.read(path) for path in (X, Y)] == [PATCHED, PATCHED]
    assert tool("revert", *tree.options).code == 0
    assert {path: tree.read(path) for path in (X, Y)} == start


def test_case_02_partly_applied_over_the_unknown(tree, tool):
    """One carries its change, one is unknown: nothing is completed, and each is named for what it is."""
    tree.sign(BOTH)
    tree.write(X, PATCHED)
    tree.write(Y, PATCHED + b"more\n")
    before = tree.everything()
    found = {file["path"]: file["state"] for file in tool("status", *tree.options).host["files"]}
    assert found == {X: "all", Y: "unknown"}
    told(tool("apply", *tree.options), 4, f"{Y}, line 8")
    assert tree.everything() == before


@pytest.mark.parametrize("carried", ["receipt", "by hand", "not at all"])
def test_case_03_conflict_is_not_already_applied(tree, tool, carried):
    """Neither forward nor backward fits, whether the rest of the tree is patched or not."""
    tree.sign(BOTH)
    if carried == "receipt":
        tool("apply", *tree.options)
    elif carried == "by hand":
        tree.write(Y, PATCHED)
    tree.write(X, A.replace(b"c\n", b"zzz\n"))
    before = tree.everything()
    for command in ("apply", "revert", "verify"):
        error = told(tool(command, *tree.options), 4)
        assert "already" not in error["what"] and (command == "verify" or f"{X}, line 3" in error["what"])
    assert tree.everything() == before
    assert {f["path"]: f["state"] for f in tool("status", *tree.options).host["files"]}[X] == "unknown"


@pytest.mark.parametrize(
    "wrong",
    [A.replace(b"c\n", b"zzz\n"), A.replace(b"g\n", b"G\n")],
    ids=["the hunk does not fit", "the hunk fits, the file is another"],
)
@pytest.mark.parametrize("path", [X, Y])
def test_case_04_half_a_patch(tree, tool, path, wrong):
    tree.sign(BOTH)
    tree.write(path, wrong)
    before = tree.everything()
    told(tool("apply", *tree.options), 4, path)
    assert tree.everything() == before  # no .rej and no .orig either


@pytest.mark.parametrize(
    "path",
    [
        "python/sglang/x.py",
        "a/python/sglang/x.py",
        "x.py",
        "site-packages/sglang/x.py",
        "usr/lib/sglang/x.py",
        "sglang-0.5.11/python/sglang/x.py",
        "srt/x.py",
        "sglang_router/x.py",
        "Sglang/x.py",
    ],
)
def test_case_05_strip_level(tree, tool, path):
    """Only paths below the package's own directory are resolved; nothing is stripped until something fits."""
    tree.sign(patch_of(path), {path: PATCHED}, {path: A})
    before = tree.everything()
    refused_at_load(tool("apply", *tree.options), path.removeprefix("a/"), "sglang/")
    assert tree.everything() == before


@pytest.mark.parametrize("kind", ["path file", "import hook"])
def test_case_05_layout_of_a_source_tree(tmp_path, tree, tool, installed_editable, kind):
    """The same series on an editable install: the files of the source tree are patched, wherever it lies."""
    tree.sign(BOTH)
    venv, source = installed_editable(kind, {X: A, Y: A})
    before = contents(source)
    options = ("--venv", venv, "--no-restart", "--json")
    done = tool("apply", *options)
    assert done.code == 0, done.stderr
    assert done.host["installation"]["editable"] and done.host["installation"]["root"] == str(source)
    patched = contents(source)
    assert {path for path in patched if patched[path] != before.get(path) and not path.endswith(".pyc")} == {X, Y}
    assert patched[X] == PATCHED
    assert tool("revert", *options).code == 0
    assert contents(source) == before


def test_case_05_a_source_tree_of_a_release_without_series(tree, tool, installed_editable):
    tree.sign(BOTH)
    settings = tree.series / "series.toml"
    settings.write_text(settings.read_text().replace(f'["{VERSION}"]', '["0.5.10"]'))
    venv, source = installed_editable("path file", {X: A, Y: A})
    before = contents(source)
    for command in ("doctor", "apply"):
        said = tool(command, "--venv", venv, "--json")
        assert said.code == 4 and said.error["error"] == "UnsupportedVersion", said.stderr
        assert "an editable installation" in said.error["what"]
        assert f"fork init {VERSION} --from-tree" in said.error["next"]
    assert contents(source) == before


@one_tree
@given(counts=st.tuples(*[st.integers(0, 6)] * 2).filter(lambda counts: counts != (3, 3)), tail=st.booleans())
def test_case_06_corrupt_counts(tree, tool, unanswered, counts, tail):
    """The right counts of H are 3 and 3; whether another file follows it or the patch ends there."""
    header = b"@@ -2,%d +2,%d @@" % counts
    tree.sign(patch_of(X, hunks=H.replace(b"@@ -2,3 +2,3 @@", header)) + (patch_of(Y) if tail else b""))
    error = refused_at_load(tool("apply", "--host", "demo", *tree.options), ", line ")
    assert 3 <= int(error["where"].rpartition("line ")[2]) <= 10
    assert not unanswered(), "the host was asked"


@pytest.mark.parametrize(
    "header",
    [
        b"@@ -2,3 +2,6 @@",
        b"@@ -2,9999999999 +2,3 @@",
        b"@@ -2,3 +2,-3 @@",
        b"@@ -2,3 @@",
        b"@@ -2,3 +2,3",
        b"@@ @@",
        b"@@ -3,3 +3,3 @@",
        b"@@ -2,3 +3,3 @@",
        b"@@ -0,3 +0,3 @@",
        b"@@@ -2,3 -2,3 +2,3 @@@",
    ],
)
def test_case_06_corrupt_header(tree, tool, unanswered, header):
    before = tree.everything()
    tree.sign(patch_of(X, Y).replace(b"@@ -2,3 +2,3 @@", header, 1))
    refused_at_load(tool("apply", "--host", "demo", *tree.options))
    assert not unanswered()
    assert {name: data for name, data in tree.everything().items() if "series" not in name} == before


LINE_ENDS = {"lf": b"\n", "crlf": b"\r\n"}
FOOTERS = {"none": b"", "git's": b"-- \n2.39.5\n\n", "without its space": b"--\n2.39.5\n", "crlf": b"-- \r\n2.39.5\r\n"}


@pytest.mark.parametrize("footer", FOOTERS)
@pytest.mark.parametrize("file", [*LINE_ENDS, "mixed"])
@pytest.mark.parametrize("body", [*LINE_ENDS, "mixed"])
@pytest.mark.parametrize("headers", LINE_ENDS)
def test_case_07_mangled_text(tree, tool, headers, body, file, footer):
    """Every mixture of line ends in headers, hunk and file, and what mailers put behind: right, or refused at load."""
    right = headers == "lf" and body == file and footer == "none"
    lines = _with_ends(A, file)
    after = lines.replace(b"c\n", b"C\n").replace(b"c\r\n", b"C\r\n")
    mark, hunk = H.split(b"\n", 1)
    hunk = _with_ends(hunk, body)
    head = b"--- a/%s\n+++ b/%s\n%s\n" % (X.encode(), X.encode(), mark)
    patch = head.replace(b"\n", LINE_ENDS[headers]) + hunk + FOOTERS[footer]
    tree.write(X, lines)
    names = set(contents(tree.site))
    tree.sign(patch, {X: after}, {X: lines})
    said = tool("apply", *tree.options)
    if right:
        assert said.code == 0 and tree.read(X) == after, said.stderr
    else:
        refused_at_load(said)
        assert tree.read(X) == lines
    assert {name for name in contents(tree.site) if ".ddtree-patch" not in name} == names, "another file's name"


def _with_ends(text: bytes, ends: str) -> bytes:
    """LF text of the lines of A with other line ends; mixed: those of b, d and f are CRLF."""
    if ends != "mixed":
        return text.replace(b"\n", LINE_ENDS[ends])
    place = {b"b": 1, b"c": 2, b"C": 2, b"d": 3}
    lines = text.split(b"\n")[:-1]
    at = (place.get(line[-1:], ord(line[-1:]) - ord("a")) for line in lines)
    return b"".join(line + LINE_ENDS["crlf" if number % 2 else "lf"] for line, number in zip(lines, at, strict=True))


@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda patch: patch.removesuffix(b"\n"), False),
        (lambda patch: patch[:-2], False),
        (lambda patch: patch.replace(b"\n \n", b"\n\n"), False),
        (lambda patch: patch.replace(b"\n ", b"\n"), False),
        (lambda patch: patch.replace(b"\n ", b"\n\t"), False),
        (lambda patch: patch.replace(b"\n-c", b"\n> -c"), False),
        (lambda patch: patch.replace(b"\n-c", b"\n- c"), False),
        (lambda patch: patch.replace(b"--- a/", b"\xef\xbb\xbf--- a/", 1), False),
        (lambda patch: patch.decode().encode("utf-16"), False),
        (lambda patch: b"From: ann\nSubject: [PATCH] C\n\nhello\n---\n x.py | 2 +-\n\n" + patch, True),
        (lambda patch: patch + b"\n", False),
        (lambda patch: patch + b"\n-- \nann, by mail\n", False),
        (lambda patch: patch + b"-- \n2.39.5\n" + patch_of(Y), False),
        (lambda patch: patch.replace(b"C\n", b"C\n\\ No newline at end of file\n"), False),
    ],
    ids=[
        "no final newline",
        "cut in its last line",
        "blank line stripped",
        "all spaces stripped",
        "space is a tab",
        "quoted",
        "space put in",
        "byte order mark",
        "utf-16",
        "mail around it",
        "blank line behind",
        "signature behind",
        "a file behind the signature",
        "a newline mark too many",
    ],
)
def test_case_07_mangled_otherwise(tree, tool, change, right):
    blank = A.replace(b"d\n", b"\n")
    tree.write(X, blank)
    tree.sign(change(patch_of(X, hunks=H.replace(b" d\n", b" \n"))), {X: blank.replace(b"c", b"C")}, {X: blank})
    said = tool("apply", *tree.options)
    if right:
        assert said.code == 0 and tree.read(X) == blank.replace(b"c", b"C"), said.stderr
    else:
        refused_at_load(said)
        assert tree.read(X) == blank


def test_case_07_mangled_after_it_was_signed(tree, tool):
    """What a mailer or git's autocrlf does to a series that was right: its hash is another, and it is not even read."""
    tree.sign(BOTH)
    patch = next(tree.series.glob("*.patch"))
    patch.write_bytes(BOTH.replace(b"\n", b"\r\n"))
    refused_at_load(tool("apply", *tree.options), patch.name, "sha256")


def test_case_07_the_shipped_series_and_the_real_wheel(linked_wheel, tool, tmp_path, monkeypatch):
    """git's autocrlf on installed files is drift in their first line; on the patches, a series that does not load."""
    plan = tool("apply", "--site-packages", linked_wheel, "--dry-run", "--json").host["plan"]
    path = next(action["path"] for action in plan["actions"] if action["kind"] == "modify")
    data = (linked_wheel / path).read_bytes().replace(b"\n", b"\r\n")
    (linked_wheel / path).unlink()  # a link
    (linked_wheel / path).write_bytes(data)
    before = contents(linked_wheel)
    told(tool("apply", "--site-packages", linked_wheel, "--json"), 4, f"{path}, line 1: ", "\\r")
    assert contents(linked_wheel) == before
    series = tmp_path / "series"
    shutil.copytree(shipped("patches"), series)
    for patch in series.glob("*/*.patch"):
        patch.write_bytes(patch.read_bytes().replace(b"\n", b"\r\n"))
    monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(series))
    refused_at_load(tool("apply", "--site-packages", linked_wheel, "--json"), "sha256", ".patch")


BLOCK = b"if a:\n    b\n    c\n    d\n\n"
THREE = BLOCK * 3
ABOVE = b"one\ntwo\nthree\nfour\nfive\nsix\n"


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize(
    "above", [b"", ABOVE, BLOCK, BLOCK * 2, b"\n"], ids=["none", "six lines", "a block", "two blocks", "a blank line"]
)
def test_case_08_repeated_context(tree, tool, above, block):
    """The hunk names one of three identical blocks; with lines added above it would fit another one, or none."""
    place = 5 * block
    hunk = b"@@ -%d,3 +%d,3 @@\n     b\n-    c\n+    C\n     d\n" % (place + 2, place + 2)
    after = THREE[: place * len(BLOCK) // 5] + BLOCK.replace(b"c", b"C") + THREE[(place + 5) * len(BLOCK) // 5 :]
    tree.sign(patch_of(X, hunks=hunk), {X: after}, {X: THREE})
    tree.write(X, above + THREE)
    said = tool("apply", *tree.options)
    if above:
        told(said, 4, X)
        assert tree.read(X) == above + THREE
    else:
        assert said.code == 0 and tree.read(X) == after


NEW = "sglang/new.py"
OTHER = A.replace(b"e\n", b"E\n")


def _v1(tree: Tree) -> None:
    """x: C. new: created."""
    tree.sign(
        patch_of(X) + b"--- /dev/null\n+++ b/%s\n@@ -0,0 +1 @@\n+v1\n" % NEW.encode(),
        {X: PATCHED, NEW: b"v1\n"},
        {X: A, NEW: None},
    )


def _v2(tree: Tree, kind: str) -> dict[str, bytes | None]:
    """The next version of the series; gives what must be installed after it."""
    create = b"--- /dev/null\n+++ b/%s\n@@ -0,0 +1 @@\n+v2\n" % NEW.encode()
    hunk = b"@@ -4,3 +4,3 @@\n d\n-e\n+E\n f\n"
    if kind == "changes both":
        tree.sign(patch_of(X, hunks=hunk) + create, {X: OTHER, NEW: b"v2\n"}, {X: A, NEW: None})
        return {X: OTHER, Y: A, NEW: b"v2\n"}
    if kind == "drops the new file":
        tree.sign(patch_of(X, hunks=hunk), {X: OTHER}, {X: A})
        return {X: OTHER, Y: A, NEW: None}
    if kind == "drops the changed file":
        tree.sign(create, {NEW: b"v2\n"}, {NEW: None})
        return {X: A, Y: A, NEW: b"v2\n"}
    if kind == "is about another file":
        tree.sign(patch_of(Y), {Y: PATCHED}, {Y: A})
        return {X: A, Y: PATCHED, NEW: None}
    raise ValueError(kind)


KINDS = ["changes both", "drops the new file", "drops the changed file", "is about another file"]


@pytest.mark.parametrize("kind", KINDS)
def test_case_09_v2_over_v1(tree, tool, kind):
    """v1 is undone exactly and v2 applied, in one step; a revert after it gives the stock files."""
    site = contents(tree.site)
    _v1(tree)
    assert tool("apply", *tree.options).code == 0
    after = _v2(tree, kind)
    assert tool("status", *tree.options).code == 0
    done = tool("apply", *tree.options)
    assert done.code == 0 and done.host["changed"], done.stderr
    assert {path: tree.read(path) for path in after} == after
    assert tool("verify", *tree.options).code == 0
    again = tool("apply", *tree.options)
    assert again.code == 0 and not again.host["changed"] and again.host["plan"]["noop"]
    assert tool("revert", *tree.options).code == 0
    assert contents(tree.site) == site


@pytest.mark.parametrize("kind", ["changes both", "is about another file"])
def test_case_09_v1_stays_when_v2_cannot_be(tree, tool, kind):
    """A file that v2 needs, or must give back, was edited since v1: everything stays as it is, v1 in force."""
    _v1(tree)
    assert tool("apply", *tree.options).code == 0
    _v2(tree, kind)
    for path in (X, NEW, Y):
        found = tree.read(path)
        tree.write(path, found + b"mine\n")
        before = contents(tree.site)
        said = tool("apply", *tree.options)
        if path == Y and kind != "is about another file":
            assert said.code == 0 and tree.read(Y) == A + b"mine\n"  # no business of either version
        else:
            told(said, 4, path)
            assert contents(tree.site) == before
        tree.write(path, found)
    if kind == "is about another file":
        _v1(tree)
        assert tool("verify", *tree.options).code == 0


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        ("the same bytes", "taken over"),
        ("other bytes", "refused"),
        ("empty", "refused"),
        ("a directory", "refused"),
        ("a link to the same bytes", "taken over"),
        ("a dangling link", "refused"),
        ("a pipe", "refused"),
        ("almost the same bytes", "refused"),
    ],
)
def test_case_10_new_file_exists_already(tree, tool, tmp_path, found, outcome):
    _v1(tree)
    place = tree.site / NEW
    (tmp_path / "elsewhere").write_bytes(b"v1\n")
    {
        "the same bytes": lambda: place.write_bytes(b"v1\n"),
        "other bytes": lambda: place.write_bytes(b"mine\n"),
        "empty": lambda: place.write_bytes(b""),
        "a directory": lambda: place.mkdir(),
        "a link to the same bytes": lambda: place.symlink_to(tmp_path / "elsewhere"),
        "a dangling link": lambda: place.symlink_to(tmp_path / "nowhere"),
        "a pipe": lambda: os.mkfifo(place),
        "almost the same bytes": lambda: place.write_bytes(b"v1"),
    }[found]()
    names = {path.name for path in tree.site.rglob("*")}
    said = tool("apply", *tree.options)
    if outcome == "refused":
        error = told(said, 4, NEW)
        assert found != "empty" or "empty" in error["what"]
        assert tree.read(X) == A and {path.name for path in tree.site.rglob("*")} == names
    else:
        assert said.code == 0, said.stderr
        assert {a["path"]: a["kind"] for a in said.host["plan"]["actions"]} == {X: "modify", NEW: "already"}
        assert tree.read(X) == PATCHED and tree.read(NEW) == b"v1\n"
        assert tool("revert", *tree.options).code == 0
        assert tree.read(X) == A and (tmp_path / "elsewhere").read_bytes() == b"v1\n"


ODD_HEADERS = {  # path: what stands in --- and +++
    "sglang/i/w.py": (b"a/sglang/i/w.py", b"b/sglang/i/w.py"),
    "sglang/a/b.py": (b"a/sglang/a/b.py", b"b/sglang/a/b.py"),
    "sglang/größe.py": (b'"a/sglang/gr\\303\\266\\303\\237e.py"', b'"b/sglang/gr\\303\\266\\303\\237e.py"'),
    "sglang/plain-größe.py": ("a/sglang/plain-größe.py".encode(), "b/sglang/plain-größe.py".encode()),
    "sglang/with space.py": (b"a/sglang/with space.py\t", b"b/sglang/with space.py\t"),
    'sglang/a"q".py': (b'"a/sglang/a\\"q\\".py"', b'"b/sglang/a\\"q\\".py"'),
}


def test_case_11_header_oddities(tmp_path, monkeypatch, tool):
    monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(tmp_path / "home" / "series"))
    tree = Tree(tmp_path / "home", dict.fromkeys(ODD_HEADERS, A))
    start = contents(tree.site)
    patch = b"".join(b"--- %s\n+++ %s\n%s" % (old, new, H) for old, new in ODD_HEADERS.values())
    tree.sign(patch, dict.fromkeys(ODD_HEADERS, PATCHED))
    done = tool("apply", *tree.options)
    assert done.code == 0, done.stderr
    assert {path: tree.read(path) for path in ODD_HEADERS} == dict.fromkeys(ODD_HEADERS, PATCHED)
    shown = tool("revert", *tree.options)
    assert shown.code == 0 and contents(tree.site) == start
    tree.sign(tool("diff", "--site-packages", tree.site).stdout.encode(), dict.fromkeys(ODD_HEADERS, PATCHED))
    assert tool("apply", *tree.options).code == 0, "our own diff has headers that are understood"


@pytest.mark.parametrize(
    "git",
    [
        b"diff --git a/sglang/empty.py b/sglang/empty.py\nnew file mode 100644\nindex 0000000..e69de29\n",
        b'diff --git "a/sglang/empty.py" "b/sglang/empty.py"\nnew file mode 100644\n',
    ],
)
def test_case_11_empty_new_file_without_a_hunk(tree, tool, git):
    start = contents(tree.site)
    more = b"diff --git a/sglang/x.py b/sglang/x.py\nindex 1111111..2222222 100644\n" + patch_of(X)
    tree.sign(git + more, {X: PATCHED, "sglang/empty.py": b""}, {X: A, "sglang/empty.py": None})
    assert tool("apply", *tree.options).code == 0
    assert tree.read("sglang/empty.py") == b"" and tree.read(X) == PATCHED
    assert tool("revert", *tree.options).code == 0
    assert contents(tree.site) == start


@pytest.fixture(scope="module")
def git_patches(tmp_path_factory) -> dict[str, bytes]:
    """What git itself writes for changes that are no change of text."""
    repository = tmp_path_factory.mktemp("repository")

    def git(*words: str) -> bytes:
        return subprocess.run(
            [
                "git",
                "-c",
                "user.name=t",
                "-c",
                "user.email=t@t",
                "-c",
                "core.hooksPath=/dev/null",
                "-c",
                "protocol.file.allow=always",
                *words,
            ],
            cwd=repository,
            check=True,
            capture_output=True,
        ).stdout

    def change(action, *options: str) -> bytes:
        git("reset", "-q", "--hard")
        git("clean", "-qfdx")
        action(repository / "sglang")
        git("add", "-A")
        return git("diff", "--cached", *options)

    git("init", "-q")
    (repository / "sglang").mkdir()
    for name in ("x.py", "y.py"):
        (repository / "sglang" / name).write_bytes(A)
    (repository / "sglang" / "link.py").symlink_to("x.py")
    (repository / "sglang" / "blob.py").write_bytes(b"\0\1\2")
    git("add", "-A")
    git("commit", "-qm", "start")

    def submodule(package: Path) -> None:
        subprocess.run(["git", "clone", "-q", str(repository), str(package / "sub")], check=True, capture_output=True)

    def relink(package: Path) -> None:
        (package / "link.py").unlink()
        (package / "link.py").symlink_to("y.py")

    def to_link(package: Path) -> None:
        (package / "x.py").unlink()
        (package / "x.py").symlink_to("y.py")

    def executable(package: Path) -> None:
        (package / "new.py").write_bytes(A)
        (package / "new.py").chmod(0o755)

    def mode_and_text(package: Path) -> None:
        (package / "x.py").write_bytes(PATCHED)
        (package / "x.py").chmod(0o755)

    def renamed_and_changed(package: Path) -> None:
        (package / "x.py").unlink()
        (package / "z.py").write_bytes(PATCHED)

    return {
        "mode only": change(lambda package: (package / "x.py").chmod(0o755)),
        "mode and text": change(mode_and_text),
        "new executable": change(executable),
        "new link": change(lambda package: (package / "other.py").symlink_to("/etc/passwd")),
        "changed link": change(relink),
        "removed link": change(lambda package: (package / "link.py").unlink()),
        "file becomes link": change(to_link),
        "submodule": change(submodule),
        "binary": change(lambda package: (package / "blob.py").write_bytes(b"\0\3"), "--binary"),
        "binary without its bytes": change(lambda package: (package / "blob.py").write_bytes(b"\0\3")),
        "new binary": change(lambda package: (package / "new.so").write_bytes(b"\0\3"), "--binary"),
        "rename": change(lambda package: (package / "x.py").rename(package / "z.py"), "-M"),
        "rename with a change": change(renamed_and_changed, "-M"),
        "copy": change(lambda package: (package / "z.py").write_bytes(A), "-C", "--find-copies-harder"),
    }


@pytest.mark.parametrize("place", ["alone", "behind a good file"])
@pytest.mark.parametrize(
    "kind",
    [
        "mode only",
        "mode and text",
        "new executable",
        "new link",
        "changed link",
        "removed link",
        "file becomes link",
        "submodule",
        "binary",
        "binary without its bytes",
        "new binary",
        "rename",
        "rename with a change",
        "copy",
    ],
)
def test_case_12_what_is_no_change_of_text(tree, tool, git_patches, kind, place):
    assert git_patches[kind]
    before = contents(tree.site)
    tree.sign((b"" if place == "alone" else patch_of(Y)) + git_patches[kind])
    refused_at_load(tool("apply", *tree.options), "not supported", ", line ")
    assert contents(tree.site) == before


HOSTILE = {
    "up": patch_of("../evil.py"),
    "up from inside": patch_of("sglang/../../evil.py"),
    "absolute": b"--- /etc/evil.py\n+++ /etc/evil.py\n" + H,
    "new file up": b"--- /dev/null\n+++ b/../evil.py\n@@ -0,0 +1 @@\n+evil\n",
    "two names": b"--- a/sglang/x.py\n+++ b/../evil.py\n" + H,
    "git says another name": b"diff --git a/sglang/y.py b/sglang/y.py\n" + patch_of(X),
    "escaped": b'--- "a/sglang/\\056\\056/\\056\\056/evil.py"\n+++ "b/sglang/\\056\\056/\\056\\056/evil.py"\n' + H,
    "nul": b'--- "a/sglang/x.py\\000.txt"\n+++ "b/sglang/x.py\\000.txt"\n' + H,
    "git's own": patch_of("sglang/.git/config"),
    "ed": b"3c\nC\n.\nw\n",
    "ed that runs a program": b"--- x.py\n+++ x.py\n1!touch evil\n",
    "normal diff": b"3c3\n< c\n---\n> C\n",
    "context diff": b"*** a/sglang/x.py\n--- b/sglang/x.py\n***************\n*** 2,4 ****\n"
    b"  b\n! c\n  d\n--- 2,4 ----\n  b\n! C\n  d\n",
    "html": b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head>\n<body>--- a +++ b</body></html>\n",
    "html around a patch": b"<html><pre>\n" + patch_of(X) + b"</pre></html>\n",
    "json": b'{"message": "Not Found"}\n',
    "empty": b"",
    "blank": b"\n\n  \n",
    "zeros": bytes(1000),
    "gzip": gzip.compress(BOTH),
    "headers only": b"--- a/sglang/x.py\n+++ b/sglang/x.py\n",
    "git header only": b"diff --git a/sglang/x.py b/sglang/x.py\nindex 1..2 100644\n",
    "a letter": b"Dear all,\n\nthe patch is on the web page.\n",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_case_13_hostile_or_wrong_patch(tree, tool, kind):
    tree.sign(HOSTILE[kind])
    before = tree.everything()
    refused_at_load(tool("apply", *tree.options), "0001-all-all.patch")
    refused_at_load(tool("list", "--json"))
    assert tree.everything() == before


BAD_PART = st.sampled_from(["..", ".", "", ".git", "..\\evil", "a\\b", "x\ty", "x\x07", "x\x7f"])
GOOD_PART = st.sampled_from(["sglang", "srt", "x.py", "a", "b", "..x", "~", "%2e%2e", "$HOME", "C:"])


@one_tree
@given(
    parts=st.lists(GOOD_PART, max_size=3),
    bad=BAD_PART,
    more=st.lists(GOOD_PART, min_size=1, max_size=2),
    quoted=st.booleans(),
    new=st.booleans(),
)
def test_case_13_hostile_paths(tree, tool, parts, bad, more, quoted, new):
    """No spelling of a path that is more than plain names below the package comes past the loader."""
    path = "/".join(["sglang", *parts, bad, *more])

    def named(side: str) -> bytes:
        if not quoted:
            return f"{side}/{path}".encode()
        return b'"' + b"".join(b"\\%03o" % byte for byte in f"{side}/{path}".encode()) + b'"'

    old = b"/dev/null" if new else named("a")
    tree.sign(b"--- %s\n+++ %s\n%s" % (old, named("b"), b"@@ -0,0 +1 @@\n+evil\n" if new else H))
    before = tree.everything()
    refused_at_load(tool("apply", *tree.options))
    assert tree.everything() == before


@pytest.mark.parametrize("said_by_settings", ["../evil.py", "/etc/evil.py", "sglang/../evil.py"])
def test_case_13_hostile_settings(tree, tool, said_by_settings):
    """series.toml names more files than its patches touch."""
    sign(tree.series, {"all": BOTH}, {X: A, Y: A, said_by_settings: A}, [{X: PATCHED, Y: PATCHED}])
    before = tree.everything()
    refused_at_load(tool("apply", *tree.options), said_by_settings)
    assert tree.everything() == before


def test_case_13_nothing_to_apply_is_an_error(tree, tool):
    """A catalogue of 0 series, a series of 0 patches: never a success that did nothing."""
    refused_at_load(tool("apply", *tree.options), "no series")
    sign(tree.series, {}, {}, [])
    refused_at_load(tool("apply", *tree.options))


def test_case_13_a_link_in_the_package_leads_nowhere_else(tree, tool, tmp_path):
    """The path is plain, but a directory on the way is a link: what it leads to keeps its bytes."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x.py").write_bytes(A)
    (tree.site / "sglang" / "srt").symlink_to(tmp_path / "outside")
    tree.sign(patch_of("sglang/srt/x.py"), {"sglang/srt/x.py": PATCHED}, {"sglang/srt/x.py": A})
    told(tool("apply", *tree.options), 4, "sglang/srt")
    assert contents(tmp_path / "outside") == {"x.py": A}


@pytest.fixture
def unanswered(tmp_path, monkeypatch):
    """A host `demo` that listens and never answers; the value says whether anybody has come."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (tmp_path / "ssh_config").write_text(
            f"Host demo\n  HostName 127.0.0.1\n  Port {listener.getsockname()[1]}\n  UserKnownHostsFile /dev/null\n"
        )
        monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(tmp_path / "ssh_config"))
        yield lambda: bool(select.select([listener], [], [], 0)[0])
