"""Eight hosts, each behind its own sshd, and multi-node servers: who is changed, in which order, and who is not."""

import json

import pytest

from scripts.rig.sshd import free_port
from tests.support.stub_fleet import NAMES, Fleet


def on_all(fleet: Fleet) -> list[str]:
    return ["--config", str(fleet.config), "--json", *(word for name in fleet.hosts for word in ("--host", name))]


def codes(said) -> dict[str, int]:
    return {host["host"]: host["error"]["exit_code"] if host["error"] else 0 for host in said.json["hosts"]}


def test_eight_hosts_one_drifted(fleet, tool):
    eight = fleet(8)
    eight.drift("gpu5")
    said = tool("apply", "--no-restart", *on_all(eight))
    assert said.code == 10 and eight.patched() == []
    assert codes(said) == dict.fromkeys(NAMES, 10) | {"gpu5": 4}
    assert all(
        "gpu5 could not be prepared" in host["error"]["what"] for host in said.json["hosts"] if host["host"] != "gpu5"
    )

    said = tool("apply", "--no-restart", "--keep-going", *on_all(eight))
    assert said.code == 10 and eight.patched() == [name for name in NAMES if name != "gpu5"]
    assert codes(said) == dict.fromkeys(NAMES, 0) | {"gpu5": 4}

    said = tool("revert", "--no-restart", "--limit", "gpu[1-4]", "--limit", "gpu6", *on_all(eight))
    assert said.code == 0 and eight.patched() == ["gpu7", "gpu8"]


def test_the_canary_fails_and_nobody_else_is_touched(fleet, tool):
    three = fleet(3)
    for name, host in three.hosts.items():
        host.start_server("--stub-mode", "greedy" if name == "gpu1" else "samples")
    said = tool("apply", *on_all(three))
    assert said.code == 10 and codes(said) == {"gpu1": 7, "gpu2": 10, "gpu3": 10}, said.stderr
    assert three.patched() == []
    assert [host["summary"] for host in said.json["hosts"]][1:] == ["not touched"] * 2
    assert all("gpu1 failed before" in host["error"]["what"] for host in said.json["hosts"][1:])
    assert three.hosts["gpu1"].served_identity() is None


@pytest.mark.long
def test_batches_stop_at_the_first_failure(fleet, tool):
    four = fleet(4)
    for name, host in four.hosts.items():
        host.start_server("--stub-mode", "greedy" if name == "gpu2" else "samples")
    said = tool("apply", "--batch", "1", *on_all(four))
    assert codes(said) == {"gpu1": 0, "gpu2": 7, "gpu3": 10, "gpu4": 10} and four.patched() == ["gpu1"]
    said = tool("apply", "--batch", "2", "--keep-going", *on_all(four))
    assert codes(said) == {"gpu1": 0, "gpu2": 7, "gpu3": 0, "gpu4": 0} and said.code == 10
    assert four.patched() == ["gpu1", "gpu3", "gpu4"]


def test_a_group_and_what_limit_leaves_of_it(fleet, tool):
    three = fleet(3)
    three.configure(gpu1='group = "lab"', gpu2='group = "lab"', gpu3='group = "farm"')
    given = ["--config", str(three.config), "--json"]
    said = tool("apply", "--no-restart", *given, "--host", "lab", "--limit", "gpu2")
    assert said.code == 0 and three.patched() == ["gpu2"]
    said = tool("status", *given, "--host", "lab", "--host", "farm", "--limit", "farm")
    assert [host["host"] for host in said.json["hosts"]] == ["gpu3"]
    said = tool("apply", *given, "--host", "lab", "--limit", "gpu3")
    assert said.code == 2 and "chosen are: gpu1, gpu2" in said.error["next"]


class TestOneServerOfTwoNodes:
    """`gpu1` (rank 0) and `gpu2` are one server: files and processes of both change together, or of none."""

    @pytest.fixture
    def pair(self, fleet) -> Fleet:
        pair = fleet(2)
        pair.configure(gpu1='server = "k2"', gpu2='server = "k2"')
        return pair

    def start(self, pair: Fleet, mode: str = "samples") -> None:
        address = f"127.0.0.1:{free_port()}"
        for rank, host in enumerate(pair.hosts.values()):
            host.launch("--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", address, "--stub-mode", mode)
        pair.hosts["gpu1"].wait_answer()

    def test_apply_and_revert(self, pair, tool):
        self.start(pair)
        said = tool("apply", *on_all(pair))
        assert said.code == 0, said.stderr
        identity = pair.hosts["gpu1"].served_identity()
        assert identity and pair.patched() == ["gpu1", "gpu2"]
        assert "gpu1 answers for this server" in json.dumps(said.json["hosts"][1]["steps"])
        assert tool("verify", *on_all(pair)).code == 0
        assert tool("smoke-test", *on_all(pair)).code == 0
        said = tool("restart", *on_all(pair))
        assert said.code == 0 and pair.hosts["gpu1"].served_identity() == identity
        said = tool("revert", *on_all(pair))
        assert said.code == 0, said.stderr
        assert pair.patched() == [] and pair.hosts["gpu1"].served_identity() is None

    def test_a_failed_smoke_suite_takes_both_back(self, pair, tool):
        self.start(pair, "greedy")
        before = {name: host.hashes() for name, host in pair.hosts.items()}
        said = tool("apply", *on_all(pair))
        assert said.code == 7 and codes(said) == {"gpu1": 7, "gpu2": 7}
        assert "node gpu1 of the same server failed" in said.json["hosts"][1]["error"]["what"]
        assert {name: host.hashes() for name, host in pair.hosts.items()} == before
        assert pair.hosts["gpu1"].served_identity() is None

    def test_a_commit_that_fails_on_one_node_is_taken_back_on_the_other(self, pair, tool, monkeypatch):
        self.start(pair)
        before = {name: host.hashes() for name, host in pair.hosts.items()}
        blocked = pair.hosts["gpu2"].site_packages / "sglang/srt/ddtree.py"
        blocked.mkdir()  # the plan takes it for a file that is missing
        said = tool("apply", *on_all(pair))
        blocked.rmdir()
        assert said.code in (4, 10) and pair.patched() == []
        assert {name: host.hashes() for name, host in pair.hosts.items()} == before
        assert pair.hosts["gpu1"].served_identity() is None

    @pytest.mark.long
    def test_a_node_that_dies_ends_the_wait_for_the_head(self, pair, tool):
        self.start(pair)
        before = {name: host.hashes() for name, host in pair.hosts.items()}
        failing = 'service = { args = { "--stub-fail" = true } }'
        pair.configure(gpu1='server = "k2"', gpu2=f'server = "k2"\n{failing}')
        text = pair.config.read_text().replace("deadline = 20", "deadline = 3000")  # nobody waits for it
        pair.config.write_text(text)
        said = tool("apply", *on_all(pair))
        assert said.code == 6 and codes(said) == {"gpu1": 6, "gpu2": 6}
        assert "no kernel image" in said.json["hosts"][1]["error"]["detail"]
        assert "node gpu2 of the same server failed" in said.json["hosts"][0]["error"]["what"]
        assert {name: host.hashes() for name, host in pair.hosts.items()} == before
        assert pair.hosts["gpu1"].served_identity() is None

    def test_a_node_behind_a_slow_line_is_known_before_another_ends_it(self, pair, tool):
        self.start(pair)
        slow = pair.sshds["gpu2"]
        slow.stop()
        slow.extra = 'ForceCommand sleep 0.4; exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
        (slow.home / "sshd_config").write_text((slow.home / "sshd_config").read_text() + slow.extra + "\n")
        slow.start()
        said = tool("restart", *on_all(pair))
        assert said.code == 0, said.stderr
        assert pair.hosts["gpu1"].served_identity() is None

    def test_the_head_has_to_be_listed_first(self, pair, tool):
        self.start(pair)
        tables = pair.config.read_text().split("[hosts.gpu2]")
        pair.config.write_text("[hosts.gpu2]" + tables[1] + tables[0])
        said = tool("apply", *on_all(pair))
        assert said.code == 2 and pair.patched() == []
        assert "--node-rank 1, but hosts.toml has gpu2 first of server k2" in said.stderr

    def test_a_node_alone_is_refused(self, pair, tool):
        said = tool("apply", "--config", pair.config, "--json", "--host", "gpu2")
        assert said.code == 2 and "gpu1 is a node of server k2" in said.error["what"]
        assert tool("status", "--config", pair.config, "--json", "--host", "gpu2").code == 0
        assert tool("revert", "--no-restart", "--config", pair.config, "--json", "--host", "gpu2").code == 0

    @pytest.mark.long
    def test_a_rollback_that_fails_says_what_is_left_to_do(self, pair, tool):
        self.start(pair, "greedy")
        launcher = pair.hosts["gpu2"].site_packages / "sglang/launch_server.py"
        # The old version of this node does not start any more: nobody could know before.
        code = launcher.read_bytes().replace(b"PATCHED = ", b"PATCHED = True if False else ")
        launcher.write_bytes(code.replace(b"if __name__", b"if not PATCHED: raise SystemExit(3)\nif __name__"))
        said = tool("apply", *on_all(pair))
        assert said.code == 8 and codes(said) == {"gpu1": 8, "gpu2": 8}
        restart = f"ddtree-patch restart --host gpu1 --host gpu2 --config {pair.config}"
        assert restart in said.json["hosts"][1]["error"]["commands"]
        assert pair.patched() == []
