"""Who brings the files to the hosts: this tool, and Ansible at its best."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.apply_bench.fleet import BenchProblem, Fleet, changed

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 600

# Connections of an earlier play are still open (ControlPersist), so no play pays for a login.
ANSIBLE_CFG = """\
[defaults]
inventory = {folder}/hosts
interpreter_python = {python}
collections_path = {collections}
local_tmp = {folder}/tmp
host_key_checking = True
gathering = explicit
[ssh_connection]
pipelining = True
control_path_dir = {folder}
ssh_args = -F {ssh_config} -o ControlMaster=auto -o ControlPersist=600s
"""
PATCH_TASK = """\
    - ansible.posix.patch: {{src: {patch}, basedir: "{{{{ tree }}}}", strip: 1}}
"""
COPY_TASK = """\
    - ansible.builtin.copy: {{src: {files}/, dest: "{{{{ tree }}}}/"}}
"""


class Tool:
    """`ddtree-patch apply --no-restart` on trees."""

    def __init__(self, fleet: Fleet, ssh_config: Path, *, canary: bool = False) -> None:
        self.canary = canary
        self.name = "ddtree-patch, canary first" if canary else "ddtree-patch"
        self._options = [] if canary else ["--all-at-once"]
        self._fleet = fleet
        self._env = {**os.environ, "DDTREE_PATCH_SSH_CONFIG": str(ssh_config), "PYTHONPATH": str(ROOT)}
        self._env.pop("SSH_AUTH_SOCK", None)

    def warm_up(self, names: Sequence[str]) -> None:
        """Let every host log somebody in once."""
        argv = [
            sys.executable,
            "-m",
            "patcher",
            "apply",
            "--dry-run",
            "--config",
            str(self._fleet.hosts_toml),
            *(word for name in names for word in ("--host", name)),
        ]
        _timed(argv, self._env)

    def run(self, names: Sequence[str]) -> dict[str, Any]:
        """{"seconds", "cpu_s", "steps", "programs"}: the command's wall and processor time, the longest time of
        each step over the hosts, and the programs started a host."""
        argv = [
            sys.executable,
            "-m",
            "patcher",
            "apply",
            "--no-restart",
            "--json",
            "--config",
            str(self._fleet.hosts_toml),
            *self._options,
            *(word for name in names for word in ("--host", name)),
        ]
        done = _timed(argv, self._env)
        hosts = json.loads(done.pop("stdout"))["hosts"]
        steps: dict[str, float] = {}
        for step in (step for host in hosts for step in host["steps"]):
            if step["state"] != "skipped":
                steps[step["name"]] = max(steps.get(step["name"], 0.0), step["seconds"])
        return {**done, "steps": steps, "programs": max(host["round_trips"] for host in hosts)}


class Ansible:
    """One play: the patches by ansible.posix.patch ("patch") or the finished files by ansible.builtin.copy ("copy")."""

    canary = False

    def __init__(self, venv: Path, fleet: Fleet, ssh_config: Path, kind: str) -> None:
        self.name = f"ansible, {kind}"
        self._program = venv / "bin/ansible-playbook"
        folder = ssh_config.parent
        self._play = folder / f"{kind}.yml"
        task = PATCH_TASK if kind == "patch" else COPY_TASK
        series = fleet.series
        patches = [series.directory / patch.file for patch in series.patches] if kind == "patch" else [None]
        self._play.write_text(
            "- hosts: all\n  gather_facts: false\n  tasks:\n"
            + "".join(task.format(patch=patch, files=fleet.home / "finished") for patch in patches)
        )
        (folder / "hosts").write_text("".join(f"{name} tree={tree}\n" for name, tree in fleet.trees.items()))
        config = folder / "ansible.cfg"
        config.write_text(
            ANSIBLE_CFG.format(
                folder=folder, ssh_config=ssh_config, python="/usr/bin/python3", collections=venv / "collections"
            )
        )
        self._env = {
            **os.environ,
            "ANSIBLE_CONFIG": str(config),
            "ANSIBLE_HOME": str(folder / "home"),
            "LC_ALL": "C.UTF-8",
        }
        self._env.pop("SSH_AUTH_SOCK", None)

    def warm_up(self, names: Sequence[str]) -> None:
        """Open the connections that later plays use."""
        play = self._play.with_name("warm-up.yml")
        play.write_text("- hosts: all\n  gather_facts: false\n  tasks:\n    - ansible.builtin.raw: 'true'\n")
        _timed([str(self._program), "--forks", str(len(names)), "--limit", ",".join(names), str(play)], self._env)

    def run(self, names: Sequence[str]) -> dict[str, Any]:
        """{"seconds", "cpu_s"}: the play's wall and processor time (its ssh programs included)."""
        argv = [str(self._program), "--forks", str(len(names)), "--limit", ",".join(names), str(self._play)]
        done = _timed(argv, self._env)
        del done["stdout"]
        return done


def write_finished(fleet: Fleet) -> None:
    """The files that `copy` brings, below fleet.home/finished."""
    for path, data in changed(fleet).items():
        file = fleet.home / "finished" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def ansible_venv(path: Path) -> Path:
    """A venv with ansible-core and the collection ansible.posix, built now unless there.

    The collection is taken out of the package `ansible`, which brings a hundred others: it would need a gigabyte.
    """
    if not (path / "complete").exists():
        shutil.rmtree(path, ignore_errors=True)
        for argv in (
            [sys.executable, "-m", "venv", path],
            [path / "bin/pip", "install", "-q", "ansible-core>=2.17"],
            [path / "bin/pip", "download", "-q", "--no-deps", "-d", path / "download", "ansible"],
        ):
            subprocess.run(argv, check=True, stdout=sys.stderr)
        (wheel,) = (path / "download").glob("ansible-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                path / "collections",
                [name for name in archive.namelist() if name.startswith("ansible_collections/ansible/posix/")],
            )
        shutil.rmtree(path / "download")
        (path / "complete").touch()
    return path


def ansible_versions(venv: Path) -> dict[str, str]:
    manifest = json.loads((venv / "collections/ansible_collections/ansible/posix/MANIFEST.json").read_text())
    core = subprocess.run(
        [venv / "bin/python", "-c", "import ansible.release as r; print(r.__version__)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return {"ansible-core": core, "ansible.posix": manifest["collection_info"]["version"]}


def _timed(argv: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Run a program. Raises BenchProblem when it fails."""
    before, started = os.times(), time.monotonic()
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
    seconds, after = time.monotonic() - started, os.times()
    if done.returncode:
        raise BenchProblem(f"{argv[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return {"seconds": seconds, "cpu_s": cpu, "stdout": done.stdout}
