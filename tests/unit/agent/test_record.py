"""RECORD: lines that the patch does not touch keep their bytes."""

from __future__ import annotations

import csv
import io

from hypothesis import given, settings
from hypothesis import strategies as st

from patcher.agent.record import record_lines, rewrite_record

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=12)
paths = st.lists(names.map(lambda name: "sglang/" + name.replace("/", "_")), unique=True, min_size=1, max_size=8)


def written(rows: list[list[object]], end: str) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows(rows)
    return text.getvalue().encode()


@settings(deadline=None)
@given(paths, st.sampled_from(["\n", "\r\n"]), st.data())
def test_rewriting_and_taking_it_back(paths: list[str], end: str, data: st.DataObject):
    contents = {path: data.draw(st.binary(max_size=8)) for path in paths}
    start = rewrite_record(written([["first,comma", "", ""]], end), contents, [])
    changed = data.draw(st.lists(st.sampled_from(paths), unique=True))
    after = rewrite_record(
        start,
        {path: contents[path] + b"!" for path in changed} | {"sglang/new.py": b"new"},
        [".ddtree-patch/sglang/receipt.json"],
    )
    untouched = [line for path, (line, _) in record_lines(start).items() if path not in changed]
    assert [line for line in after.splitlines(keepends=True) if line in untouched] == untouched
    assert list(record_lines(after)) == [*record_lines(start), "sglang/new.py", ".ddtree-patch/sglang/receipt.json"]
    assert rewrite_record(after, {path: contents[path] for path in changed} | {"sglang/new.py": None}, []) == start


def test_hashes_in_hex():
    lines = record_lines(b"a.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\nb.py,md5=x,1\nRECORD,,\n\n")
    assert lines["a.py"][1] == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert lines["b.py"][1] is lines["RECORD"][1] is None


def test_no_final_newline():
    assert rewrite_record(b"a,,", {}, ["b"]) == b"a,,\nb,,\n"
