"""configs/ansible, run by the real ansible-playbook: who is changed, what it says, and where a rollout stops."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.rig.processes import end_group
from tests.support.stub_fleet import Fleet
from tests.support.stub_host import StubHost

PLAYBOOKS = Path(__file__).parents[2] / "configs/ansible"
PROGRAMS = Path(sys.executable).parent
ANSIBLE = PROGRAMS / "ansible-playbook"
RECAP = re.compile(r"^(\S+) +: ok=(\d+) +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", re.MULTILINE)


@dataclass
class Played:
    """What one run of ansible-playbook gave back."""

    code: int
    text: str

    @property
    def ends(self) -> dict[str, str]:
        """Per server that was come to: changed, ok or failed."""
        return {
            name: "failed" if int(unreachable) + int(failed) else "changed" if int(changed) else "ok"
            for name, _, changed, unreachable, failed in RECAP.findall(self.text)
        }

    def message(self, server: str) -> list[str]:
        """The lines that a reader is shown of this server."""
        start = re.search(rf"^(ok|fatal): \[{server}\](: FAILED!)? => ", self.text, re.MULTILINE)
        assert start, self.text
        return json.JSONDecoder().raw_decode(self.text, start.end())[0]["msg"]


class Operator:
    """A fleet, with the inventory and hosts.toml of whoever runs playbooks on it."""

    def __init__(self, fleet: Fleet, home: Path) -> None:
        self.fleet = fleet
        self.home = home
        self.started: list[subprocess.Popen] = []
        self.inventory = fleet.config.with_name("inventory.yml")
        self.environment = {
            **os.environ,
            "HOME": str(home),
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
            "LC_ALL": "C.UTF-8",
            "ANSIBLE_LOCALHOST_WARNING": "false",
            "ANSIBLE_NOCOLOR": "1",
        }

    def take_in(self, names: Sequence[str]) -> None:
        """Write the inventory: one entry a host."""
        self.inventory.write_text(
            json.dumps(
                {"sglang": {"hosts": dict.fromkeys(names), "vars": {"ddtree_patch_config": str(self.fleet.config)}}}
            )
        )

    def start(self, playbook: str, *options: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen:
        """As the leader of a process group, which Ctrl-C is sent to."""
        self.started.append(
            subprocess.Popen(
                [ANSIBLE, "--inventory", self.inventory, *options, PLAYBOOKS / playbook],
                cwd=self.home,
                env={**self.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        )
        return self.started[-1]

    def stop(self) -> None:
        for run in self.started:
            if run.poll() is None:
                end_group(run.pid)
                run.communicate()

    def play(self, playbook: str, *options: str, environment: Mapping[str, str] | None = None) -> Played:
        run = self.start(playbook, *options, environment=environment)
        text, _ = run.communicate(timeout=300)
        return Played(run.returncode, text)

    def logged_in_to(self) -> list[str]:
        return [name for name, sshd in self.fleet.sshds.items() if "Accepted publickey" in sshd.log.read_text()]


@pytest.fixture
def operator(fleet: Callable[[int], Fleet], tmp_path: Path) -> Iterator[Callable[[int], Operator]]:
    operators: list[Operator] = []

    def make(count: int) -> Operator:
        (tmp_path / "operator").mkdir()
        operators.append(Operator(fleet(count), tmp_path / "operator"))
        return operators[-1]

    yield make
    for made in operators:
        made.stop()


def test_the_example_looks_applies_once_and_reverts(operator):
    four = operator(4)
    fleet, servers = four.fleet, ("gpu1", "gpu2", "kimi")
    fleet.configure(gpu3='server = "kimi"', gpu4='server = "kimi"')
    shutil.copy(PLAYBOOKS / "inventory.example.yml", four.inventory)
    before = {name: host.hashes() for name, host in fleet.hosts.items()}
    fleet.hosts["gpu1"].start_server()
    process = fleet.hosts["gpu1"].server_pids()

    looked = four.play("apply.yml", "--check")
    assert looked.code == 0 and looked.ends == dict.fromkeys(servers, "changed"), looked.text
    assert looked.message("gpu1")[0].startswith("gpu1: dry run, nothing was changed: pristine -> temperature")
    assert {name: host.hashes() for name, host in fleet.hosts.items()} == before
    assert fleet.hosts["gpu1"].server_pids() == process

    applied = four.play("apply.yml")
    assert applied.code == 0 and applied.ends == dict.fromkeys(servers, "changed"), applied.text
    assert fleet.patched() == ["gpu1", "gpu2", "gpu3", "gpu4"] and fleet.hosts["gpu1"].served_identity()
    nodes = [line for line in applied.message("kimi") if line.startswith("gpu")]
    assert [line.split(" applied ")[0] for line in nodes] == [f"gpu{n}: series sglang-0.5.11" for n in (3, 4)]
    assert [line.split(":")[1] for line in applied.message("gpu2") if "no server is running" in line] == [
        " restart",
        " smoke suite",
    ]

    again = four.play("apply.yml")
    assert again.code == 0 and again.ends == dict.fromkeys(servers, "ok"), again.text
    assert again.message("gpu1")[0] == "gpu1: already at stage temperature: nothing to change"

    reverted = four.play("revert.yml")
    assert reverted.code == 0 and reverted.ends == dict.fromkeys(servers, "changed"), reverted.text
    assert {name: host.hashes() for name, host in fleet.hosts.items()} == before
    assert fleet.hosts["gpu1"].served_identity() is None


@pytest.mark.long
def test_a_drifted_host_and_a_failed_smoke_suite_stop_the_rollout(operator):
    eight = operator(8)
    fleet = eight.fleet
    eight.take_in(list(fleet.hosts))
    fleet.drift("gpu2")
    fleet.hosts["gpu3"].start_server("--stub-mode", "greedy")
    played = eight.play("apply.yml")
    assert played.code == 2 and played.ends == {"gpu1": "changed", "gpu2": "failed", "gpu3": "failed"}, played.text
    assert fleet.patched() == ["gpu1"] and fleet.hosts["gpu3"].served_identity() is None
    assert eight.logged_in_to() == ["gpu1", "gpu2", "gpu3"]

    drift = played.message("gpu2")
    assert drift[0].startswith("gpu2: ") and "  where: sglang/srt/worker.py:41" in drift and "  exit code: 4" in drift
    said = "  next: nothing was written; take the edits out, or reinstall the package: pip install"
    assert any(line.startswith(said) for line in drift), drift
    assert any("installed '# edited'" in line for line in drift)
    smoke = played.message("gpu3")
    assert smoke[0].startswith("gpu3: the smoke suite failed: ") and "  exit code: 7" in smoke
    assert any(line.startswith("  next: everything was rolled back; see the failed checks") for line in smoke)
    assert any("the server decodes greedily" in line for line in smoke)


def test_what_fails_before_a_host_is_looked_at(operator):
    two = operator(2)
    two.take_in(["gpu1", "gpu2"])
    two.fleet.sshds["gpu1"].stop()
    message = two.play("apply.yml").message("gpu1")
    assert message[0].startswith("gpu1: no connection to 127.0.0.1:") and "  exit code: 3" in message

    two.fleet.configure(gpu1='server = "kimi"', gpu2='server = "kimi"')
    message = two.play("apply.yml").message("gpu1")
    assert message[0] == "ddtree-patch: gpu2 is a node of server kimi, as gpu1, and was not chosen"
    assert "  next: choose all nodes of a server: they can only be changed together" in message

    played = two.play("apply.yml", environment={"PATH": "/usr/bin:/bin"})
    assert played.ends == {"gpu1": "failed"} and "No such file or directory: b'ddtree-patch'" in played.text
    assert two.fleet.patched() == [] and two.logged_in_to() == []


@pytest.mark.long
def test_ctrl_c_ends_the_call_under_way_too(operator):
    one = operator(1)
    host = one.fleet.hosts["gpu1"]
    one.take_in(["gpu1"])
    old = host.start_server().pid
    host.misbehave(patched=["--stub-ready-file", str(host.home / "never")])
    playing = one.start("apply.yml")
    wait_until(lambda: servers(host) - {old})  # what is waited for then never becomes ready
    os.killpg(playing.pid, signal.SIGINT)
    playing.communicate(timeout=60)
    assert playing.returncode != 0
    wait_until(lambda: not any(str(one.fleet.config) in words for words in command_lines().values()))

    host.misbehave()
    assert one.fleet.patched() == ["gpu1"]
    played = one.play("apply.yml")
    assert played.code == 0 and played.ends == {"gpu1": "ok"} and host.served_identity(), played.text


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def servers(host: StubHost) -> set[int]:
    lines = command_lines()
    return {pid for pid in host.server_pids() if "sglang.launch_server" in lines.get(pid, [])}


def command_lines() -> dict[int, list[str]]:
    """Of every process, by its id."""
    lines = {}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines[int(entry.parent.name)] = entry.read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return lines
