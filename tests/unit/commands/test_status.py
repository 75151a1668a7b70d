"""list and doctor: what they say of a host is what apply would find there."""

import json


def test_doctor_fails_where_apply_would_for_want_of_the_kernel(stub_host, tool):
    config = stub_host.configure("local", require=True)
    looked = tool("doctor", "--local", "--config", config, "--json")
    applied = tool("apply", "--local", "--config", config, "--json")
    assert (looked.code, applied.code) == (5, 5) and looked.error["what"] == applied.error["what"]
    assert "in the way" in looked.host["summary"]


def test_doctor_says_what_a_missing_kernel_means_where_none_is_required(stub_host, tool):
    said = tool("doctor", "--local", "--config", stub_host.configure("local"), "--json")
    assert said.code == 0 and said.host["summary"] == "ready for apply"
    assert any("kernel" in line and "T > 0 uses sample-and-follow" in line for line in said.host["not_done"])


def test_doctor_says_that_it_left_out_the_kernel_as_apply_would(stub_host, tool):
    said = tool("doctor", "--site-packages", stub_host.site_packages, "--json")
    (probe,) = [step for step in said.host["steps"] if step["name"] == "kernel probe"]
    assert said.code == 0 and "not tried, nor would apply try it: a tree of files" in probe["detail"]


def test_the_first_line_of_list_tells_a_patched_tree_from_a_pristine_one(stub_host, tool):
    def first_line() -> str:
        return tool("list", "--site-packages", stub_host.site_packages).stdout.splitlines()[2]

    assert first_line() == "sglang 0.5.11: not patched; series sglang-0.5.11 can be applied"
    assert tool("apply", "--site-packages", stub_host.site_packages).code == 0
    assert first_line() == "sglang 0.5.11: patched: series sglang-0.5.11, stage temperature"


def test_what_becomes_of_a_server_that_was_left_down_is_said_beforehand(stub_host, tool):
    pid = stub_host.start_server().pid
    options = ("--local", "--config", stub_host.configure("local", args={"--stub-fail": True}), "--json")
    left = tool("revert", *options, "--dry-run").host
    assert left["plan"]["server"]["kind"] == "none" and "; no restart" in left["summary"]
    assert tool("apply", *options, "--no-restart").code == 0
    assert f"process {pid} would be restarted" in tool("revert", *options, "--dry-run").host["summary"]
    assert tool("restart", *options).code == 6 and not stub_host.server_pids()
    left_down = "an earlier command had stopped it, and no other was ready in its place"
    (service,) = [step for step in tool("doctor", *options).host["steps"] if step["name"] == "service"]
    assert service["detail"] == f"process: no server is running: {left_down}; apply starts it again"
    dry = tool("revert", *options, "--dry-run")
    assert dry.host["summary"].endswith(f"; the server would be started, because {left_down}")


def test_status_shows_the_files_also_where_what_is_kept_of_the_server_is_damaged(stub_host, tool):
    stub_host.start_server()
    options = ("--local", "--config", stub_host.configure("local"), "--json")
    assert tool("apply", *options).code == 0
    stub_host.stop()
    kept = stub_host.venv / ".ddtree-patch/sglang/state.json"
    state = json.loads(kept.read_text())
    kept.write_text(json.dumps({name: "odd" if name.startswith("service") else state[name] for name in state}))
    said = tool("status", *options)
    assert said.code == 0 and said.host["state"] == "temperature" and said.host["files"]
    assert "makes no sense" in said.host["facts"]["server"]
