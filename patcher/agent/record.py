"""The distribution's RECORD: which file has which hash."""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import io
from collections.abc import Iterable, Mapping

from .site import STATE_DIRECTORY


def record_lines(data: bytes) -> dict[str, tuple[bytes, str | None]]:
    """path -> (line with its end, sha256 in hex or None), in the order of the file."""
    lines = {}
    for line in data.splitlines(keepends=True):
        row = next(csv.reader([line.decode("utf-8", "surrogateescape")]), [])
        if row:
            lines[row[0]] = (line, _hex(row[1] if len(row) > 1 else ""))
    return lines


def rewrite_record(data: bytes, files: Mapping[str, bytes | None], listed: Iterable[str]) -> bytes:
    """RECORD with new lines for FILES, and of the state files exactly the LISTED ones.

    files: path -> new bytes, or None for a file that is gone. listed: paths without a hash, for files that
    change. The lines of all other files keep their bytes.
    """
    end = b"\r\n" if b"\r\n" in data else b"\n"
    if data and not data.endswith((b"\n", b"\r")):
        data += end
    lines = {path: line for path, (line, _) in record_lines(data).items() if STATE_DIRECTORY not in path.split("/")}
    for path, content in files.items():
        if content is None:
            lines.pop(path, None)
        else:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines[path] = _line(path, "sha256=" + digest, len(content)) + end
    for path in listed:
        lines[path] = _line(path, "", "") + end
    return b"".join(lines.values())


def _line(*row: object) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(row)
    return text.getvalue().encode("utf-8", "surrogateescape")


def _hex(field: str) -> str | None:
    algorithm, _, value = field.partition("=")
    if algorithm != "sha256":
        return None
    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except binascii.Error:
        return None
