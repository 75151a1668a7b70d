"""Which installation is meant, and the servers that run it or another copy."""

from pathlib import Path

import msgspec
import pytest

from patcher.errors import Conflict, NoInstallation, UsageProblem
from patcher.hosts import EndpointSettings, HostSettings
from patcher.installation import find
from patcher.installation.find import find_target, redacted, refuse_other_copy, serving_processes
from patcher.wire.types import Interpreter
from tests.support import builders
from tests.support.builders import process

HOST = HostSettings("gpu", address="gpu")


def inspection(venv):
    interpreter = Interpreter(executable=f"{venv}/bin/python", version="3.11.7", prefix=venv, real_prefix=venv)
    return builders.inspection(Path(f"{venv}/lib/site-packages"), (), interpreter=interpreter)


@pytest.fixture
def host_runs(monkeypatch):
    """`host_runs(process, ...)`: what the agent lists; gives the interpreters that were asked."""
    asked = []

    def set_processes(*processes, missing=()):
        def call_agent(connection, python, request):
            asked.append(python)
            return {"processes": msgspec.to_builtins(processes), "missing": list(missing)}

        monkeypatch.setattr(find, "call_agent", call_agent)
        return asked

    return set_processes


def test_the_serving_venv_is_taken_when_none_is_named(host_runs):
    asked = host_runs(process(1, "/opt/a", 30000))
    assert find_target(None, HOST, "sglang").python == "/opt/a/bin/python"
    assert asked == ["python3"]


def test_two_servers_of_one_venv_are_one_venv(host_runs):
    host_runs(process(1, "/opt/a", 30000), process(2, "/opt/a", 30001))
    assert find_target(None, HOST, "sglang").python == "/opt/a/bin/python"


def test_several_serving_venvs_are_listed_to_choose_from(host_runs):
    host_runs(process(1, "/opt/a", 30000), process(2, "/opt/b", 30001))
    with pytest.raises(UsageProblem, match="2 different venvs") as refused:
        find_target(None, HOST, "sglang")
    assert "--venv /opt/a " in refused.value.detail and "--venv /opt/b " in refused.value.detail
    assert "s3cret" not in refused.value.detail


def test_the_endpoints_port_chooses(host_runs):
    host_runs(process(1, "/opt/a", 30000), process(2, "/opt/b", 30001))
    chosen = find_target(None, HostSettings("gpu", endpoint=EndpointSettings(port=30001)), "sglang")
    assert chosen.python == "/opt/b/bin/python"


def test_no_server_and_no_venv(host_runs):
    host_runs()
    with pytest.raises(NoInstallation, match="no SGLang server is running"):
        find_target(None, HOST, "sglang")


def test_the_venv_of_a_server_that_was_left_down_is_taken(host_runs):
    missing = {"port": 30000, "python": "/opt/a/bin/python3"}
    host_runs(missing=[missing])
    assert find_target(None, HOST, "sglang").python == "/opt/a/bin/python3"
    host_runs(process(2, "/opt/b", 30001), missing=[missing])
    chosen = find_target(None, HostSettings("gpu", endpoint=EndpointSettings(port=30000)), "sglang")
    assert chosen.python == "/opt/a/bin/python3"


def test_a_named_venv_is_asked_itself_and_must_be_absolute(host_runs):
    asked = host_runs()
    assert find_target(None, HostSettings("gpu", venv="/opt/c/"), "sglang").python == "/opt/c/bin/python3"
    assert asked == ["/opt/c/bin/python3"]
    with pytest.raises(UsageProblem, match="absolute"):
        find_target(None, HostSettings("gpu", venv="c"), "sglang")


def test_a_tree_needs_no_look_at_processes(host_runs):
    asked = host_runs()
    tree = find_target(None, HostSettings("gpu", site_packages="/image/site-packages"), "sglang")
    assert tree.is_tree and asked == []


def test_a_server_of_another_copy_is_refused_and_one_of_a_linked_venv_is_not(host_runs):
    host_runs(process(1, "/opt/link", 30000, real_prefix="/data/a"))
    found = find_target(None, HostSettings("gpu", venv="/data/a"), "sglang")
    refuse_other_copy(found, inspection("/data/a"))
    with pytest.raises(Conflict, match="another copy") as refused:
        refuse_other_copy(found, inspection("/data/b"))
    assert "pid 1" in refused.value.detail and "s3cret" not in refused.value.detail


def test_a_source_tree_before_the_installed_package_is_another_copy(host_runs):
    host_runs(process(1, "/data/a", 30000, sglang_root="/src/sglang"))
    found = find_target(None, HostSettings("gpu", venv="/data/a"), "sglang")
    assert serving_processes(found, inspection("/data/a")) == []


def test_a_server_on_another_port_is_no_concern(host_runs):
    host_runs(process(1, "/opt/b", 31000))
    host = HostSettings("gpu", venv="/data/a", endpoint=EndpointSettings(port=30000))
    refuse_other_copy(find_target(None, host, "sglang"), inspection("/data/a"))


@pytest.mark.parametrize(
    "argv",
    [
        ["x", "--api-key", "s3cret", "--port", "1"],
        ["x", "--api-key=s3cret", "--port", "1"],
        ["x", "--port", "1", "--admin-api-key", "s3cret"],
    ],
)
def test_keys_are_never_shown(argv):
    shown = " ".join(redacted(argv))
    assert "s3cret" not in shown and "--port 1" in shown
