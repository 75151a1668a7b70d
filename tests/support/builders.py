"""Small synthetic packages and series, for tests that need no real release."""

from __future__ import annotations

import csv
import hashlib
import io
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patcher.series import udiff
from patcher.series.model import Series
from patcher.series.write import PatchText, write_series
from patcher.typed import typed
from patcher.wire.types import FileEntry, Inspection, Process, Receipt

VERSION = "0.5.11"
PRISTINE: dict[str, bytes | None] = {
    "sglang/__init__.py": b"",
    "sglang/srt/__init__.py": b"",
    "sglang/srt/args.py": b"".join(b"ARG_%d = %d\n" % (n, n) for n in range(40)),
    "sglang/srt/info.py": b"def verify():\n    return 'greedy'\n",
    "sglang/srt/worker.py": b"".join(b"def step_%d():\n    return %d\n\n\n" % (n, n) for n in range(10)),
    "sglang/srt/ddtree.py": None,
}
DDTREE: dict[str, bytes | None] = {
    "sglang/srt/args.py": PRISTINE["sglang/srt/args.py"].replace(b"ARG_20 = 20\n", b"ARG_20 = 'ddtree'\n"),
    "sglang/srt/worker.py": PRISTINE["sglang/srt/worker.py"].replace(b"return 5\n", b"return 'tree'\n"),
    "sglang/srt/ddtree.py": b"def build():\n    return 'tree'\n",
}
TEMPERATURE: dict[str, bytes | None] = {
    "sglang/srt/info.py": b"def verify():\n    return 'sampled'\n",
    "sglang/srt/worker.py": DDTREE["sglang/srt/worker.py"].replace(b"'tree'\n", b"'sampling tree'\n"),
}
STAGES = {"ddtree": DDTREE, "temperature": TEMPERATURE}


def make_package(
    root: Path, files: Mapping[str, bytes | None] = PRISTINE, package: str = "sglang", version: str = VERSION
) -> Path:
    """Install ``files`` below ``root``, with a .dist-info and its RECORD; returns ``root``, the site-packages."""
    info = f"{package}-{version}.dist-info"
    written = {path: data for path, data in files.items() if data is not None}
    written[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode()
    written[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    written[f"{info}/INSTALLER"] = b"pip\n"
    rows = io.StringIO(newline="")
    writer = csv.writer(rows, lineterminator="\n")
    for path, data in written.items():
        writer.writerow([path, f"sha256={_urlsafe(data)}", len(data)])
    writer.writerow([f"{info}/RECORD", "", ""])
    written[f"{info}/RECORD"] = rows.getvalue().encode()
    for path, data in written.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def make_series(
    directory: Path,
    pristine: Mapping[str, bytes | None] = PRISTINE,
    stages: Mapping[str, Mapping[str, bytes | None]] = STAGES,
    package: str = "sglang",
    version: str = VERSION,
    shared: Mapping[str, bytes] | None = None,
) -> Series:
    """Write a series with one patch a stage; each stage maps the files that it changes to their new bytes.

    With ``shared`` the first stage begins with a patch of the core, named "core-all", which adds these files.
    """
    now = dict(pristine)
    patches = []
    if shared:
        diff = b"".join(new_file(path, data) for path, data in shared.items())
        now |= shared
        patches.append(PatchText("core-all", next(iter(stages)), "what is shared", diff, shared=True))
    for stage, changed in stages.items():
        diff = b"".join(udiff.make(path, now.get(path), data) for path, data in changed.items())
        now |= changed
        patches.append(PatchText(f"{stage}-all", stage, f"what {stage} does", diff))
    touched = {path for changed in (shared or {}, *stages.values()) for path in changed}
    return write_series(
        directory,
        name=f"{package}-{version}",
        package=package,
        versions=[version],
        ops=["tree_speculative_sampling_target_only"],
        stages={stage: f"purpose of {stage}" for stage in stages},
        patches=patches,
        pristine={path: pristine.get(path) for path in touched},
    )


def new_file(path: str, data: bytes) -> bytes:
    """The diff of a new file, byte for byte as git writes it."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest().encode()
    return udiff.make(path, None, data).replace(b"\n--- ", b"\nindex %s..%s\n--- " % (b"0" * 40, blob), 1)


def files_after(stage: str) -> dict[str, bytes | None]:
    """All files of the default package after a stage of the default series ("pristine" too)."""
    now = dict(PRISTINE)
    for name, changed in STAGES.items() if stage != "pristine" else ():
        now |= changed
        if name == stage:
            break
    return now


def process(pid: int, venv: str = "/opt/v", port: int | None = None, **more: Any) -> Process:
    """A launcher of SGLang that runs from ``venv`` and listens on ``port``, if there is one."""
    fields = {
        "argv": ("python", "-m", "sglang.launch_server", "--port", str(port), "--api-key", "s3cret"),
        "exe": "/usr/bin/python3.11",
        "python": f"{venv}/bin/python",
        "prefix": venv,
        "real_prefix": venv,
        "listening": (port,) if port else (),
        "sglang_root": None,
        "pycache_prefix": None,
        "start_time": 1.0,
        "keeper": None,
    }
    return Process(pid=pid, **{**fields, **more})


def inspection(
    root: Path,
    paths: object,
    receipt: Mapping | None = None,
    version: str = VERSION,
    backups: Mapping[str, bytes] | None = None,
    record: Mapping[str, str] | None = None,
    **more: Any,
) -> Inspection:
    """What the agent's inspect would say of these paths; ``backups`` maps paths to the bytes kept from before."""
    files = {}
    for path in paths:
        data = (root / path).read_bytes() if (root / path).is_file() else None
        files[path] = FileEntry(
            sha256=None if data is None else hashlib.sha256(data).hexdigest(),
            record_sha256=(record or {}).get(path),
            size=None if data is None else len(data),
            link=None,
            links=None if data is None else 1,
            data=data,
            before_data=(backups or {}).get(path),
        )
    on_host = {"by": "someone", "host": {"commit_time": 1.7e9}}
    fields = {
        "root": str(root),
        "version": version,
        "editable": False,
        "state_dir": str(root / ".ddtree-patch"),
        "package_dir": str(root / "sglang"),
        "files": files,
        "interpreter": None,
        "receipt": typed({**on_host, **receipt}, Receipt) if receipt else None,
        "receipt_state": "valid" if receipt else "none",
        "journal": False,
        "lock": None,
        "missing_backups": (),
        "free_bytes": 1 << 40,
        "recovered": "nothing",
        "left": (),
        "exposed": (),
        "writable": None,
    }
    return Inspection(**{**fields, **more})


def _urlsafe(data: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
