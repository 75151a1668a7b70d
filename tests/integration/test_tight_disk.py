"""What an apply leaves free on a nearly full disk is enough for its revert."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.installations import Installation, may_mount

APPLY_AND_REVERT = """
import json, sys
from pathlib import Path
from patcher.errors import Conflict
from tests.support.installations import Installation
host = Installation(Path(sys.argv[1]), Path(sys.argv[2]))
said = []
for stage, request in zip(("temperature", "pristine"), map(json.loads, sys.argv[3:])):
    try:
        host.ask("commit", **request)
    except Conflict as failure:
        said.append(str(failure))
        break
    said.append("done")
    assert host.is_stage(stage) and host.leftovers() == []
print(json.dumps((said + ["not tried"])[:2]))
"""


@pytest.mark.skipif(not may_mount(), reason="a mount namespace needs root with CAP_SYS_ADMIN")
@pytest.mark.parametrize("kilobytes", range(80, 92, 4))
def test_what_had_the_space_to_come_has_the_space_to_go(tmp_path: Path, kilobytes: int):
    """An apply on a nearly full disk, then a revert on what is left of it."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    host = Installation.in_venv(tmp_path / "host")
    inside = Installation(mounted / host.site.relative_to(host.venv), mounted)
    requests = []
    for stage in ("temperature", "pristine"):
        requests.append(json.dumps(host.request(stage)))
        host.commit(stage)
    script = f"""
        set -e
        mount -t tmpfs -o size=16m tmpfs {mounted}
        cp -a {host.venv}/. {mounted}
        rm -rf {mounted}/.ddtree-patch
        free=$(df -k --output=avail {mounted} | tail -1)
        head -c $(( (free - {kilobytes}) * 1024 )) /dev/zero > {mounted}/filler
        exec "$@" """
    done = host.connection.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            script,
            "sh",
            sys.executable,
            "-c",
            APPLY_AND_REVERT,
            str(inside.site),
            str(mounted),
            *requests,
        ]
    )
    assert done.rc == 0, done.stderr.decode()
    applied, reverted = json.loads(done.stdout)
    assert reverted == ("done" if applied == "done" else "not tried"), (applied, reverted)
