"""hosts.toml is read strictly, and a host without an entry works all the same."""

import re
from pathlib import Path

import pytest

from patcher.errors import UsageProblem
from patcher.hosts import HostSettings
from patcher.hosts_file import load_config

EXAMPLE = Path(__file__).parents[2] / "configs/hosts.example.toml"
SERVICES = Path(__file__).parents[2] / "docs/services.md"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_example_is_valid_and_names_the_documented_host():
    config = load_config(EXAMPLE)
    (host,) = config.select(["10.1.2.200"])
    assert host.address == "10.1.2.200"
    assert host.service.args == {"--speculative-algorithm": "DDTREE", "--attention-backend": "triton"}
    assert (host.endpoint.host, host.endpoint.port, host.ready.deadline, host.kernels.require) == (
        "127.0.0.1",
        None,
        1800.0,
        True,
    )


def test_the_documented_server_of_two_nodes(tmp_path):
    *_, fragment = re.findall(r"^```toml\n(.*?)^```$", SERVICES.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    hosts = load_config(write(tmp_path, fragment)).select(["kimi-k2"])
    assert [(host.name, host.head, host.server, host.answers) for host in hosts] == [
        ("kimi-0", "kimi-0", "kimi", True),
        ("kimi-1", "kimi-0", "kimi", False),
    ]


def test_defaults_are_merged_table_by_table_and_the_host_wins(tmp_path):
    config = load_config(
        write(
            tmp_path,
            """
        [defaults]
        user = "ops"
        [defaults.service]
        kind = "systemd"
        scope = "user"
        [defaults.endpoint]
        port = 30000
        api_key_env = "KEY"
        [hosts.a]
        user = "root"
        group = "lab"
        [hosts.a.service]
        unit = "sglang.service"
        [hosts.a.endpoint]
        port = 30001
        [hosts.b]
        group = "lab"
        service = { kind = "none" }
    """,
        )
    )
    a, b = config.select(["lab"])
    assert (a.user, a.service.kind, a.service.unit, a.service.scope) == ("root", "systemd", "sglang.service", "user")
    assert (a.endpoint.port, a.endpoint.api_key_env) == (30001, "KEY")
    assert (b.address, b.user, b.service.kind, b.endpoint.port) == ("b", "ops", "none", 30000)


def test_a_multi_node_server_is_chosen_by_its_name(tmp_path):
    config = load_config(
        write(
            tmp_path,
            """
        [hosts.n0]
        server = "kimi"
        group = "lab"
        [hosts.n1]
        server = "kimi"
        [hosts.other]
        group = "lab"
    """,
        )
    )
    assert [host.name for host in config.select(["kimi"])] == ["n0", "n1"]
    assert [host.name for host in config.select(["lab", "kimi"])] == ["n0", "other", "n1"]
    assert [host.name for host in config.limit(config.select(["lab"]), ["kim?"])] == ["n0"]


def test_a_name_that_is_not_in_the_file_is_an_address_with_the_defaults(tmp_path):
    config = load_config(write(tmp_path, '[defaults]\nvenv = "/v"\n'))
    assert config.select(["10.9.9.9"]) == (HostSettings(name="10.9.9.9", address="10.9.9.9", venv="/v"),)


def test_the_same_host_twice_is_one_host(tmp_path):
    config = load_config(write(tmp_path, '[hosts.a]\ngroup = "lab"\n'))
    assert [host.name for host in config.select(["a", "lab", "a"])] == ["a"]


def test_local_takes_its_entry_or_the_defaults(tmp_path):
    assert load_config(write(tmp_path, "")).local() == HostSettings(name="local", local=True)
    with_entry = load_config(write(tmp_path, '[hosts.local]\nvenv = "/v"\n'))
    assert with_entry.local().local and with_entry.local().venv == "/v"


def test_without_a_file_the_configuration_is_empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config()
    assert config.source is None and not config.hosts


def test_search_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    mine = tmp_path / "home/.config/ddtree-patch/hosts.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text("[hosts.mine]\n")
    assert list(load_config().hosts) == ["mine"]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/hosts.toml").write_text("[hosts.here]\n")
    assert list(load_config().hosts) == ["here"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[hosts.a.kernels]\nrequrie = false\n", "hosts.a.kernels.requrie"),
        ("[hosts.a]\nname = 'b'\n", "hosts.a.name"),
        ("[hots.a]\n", "hots"),
        ("[defaults]\naddress = 'x'\n", "defaults.address"),
        ("[hosts.a]\nport = '22'\n", "hosts.a.port"),
        ("[hosts.a]\nport = true\n", "hosts.a.port"),
        ("[hosts.a]\nport = 70000\n", "hosts.a.port"),
        ("[hosts.a]\nsudo = 'yes'\n", "hosts.a.sudo"),
        ("[hosts.a]\nservice = 'systemd'\n", "hosts.a.service"),
        ("[hosts.a.ready]\ndeadline = -1\n", "hosts.a.ready.deadline"),
        ("[hosts.a.ready]\ndeadline = inf\n", "hosts.a.ready.deadline"),
        ("[hosts.a.service]\nkind = 'upstart'\n", "hosts.a.service.kind"),
        ("[hosts.a.service]\nkind = 'systemd'\n", "hosts.a.service.unit"),
        ("[hosts.a.service]\nkind = 'command'\n", "hosts.a.service.restart"),
        ("[hosts.a.service]\nkind = 'command'\nrestart = 'sh -c x'\n", "hosts.a.service.restart"),
        ("[hosts.a.service]\nkind = 'systemd'\nunit = 'x'\nscope = 'root'\n", "hosts.a.service.scope"),
        ("[hosts.a.service]\nkind = 'none'\nargs = { '--x' = '1' }\n", "hosts.a.service.args"),
        ("[hosts.a.service.args]\nspeculative = '1'\n", "hosts.a.service.args.speculative"),
        ("[hosts.a.service.args]\n'--x' = ['1']\n", "hosts.a.service.args.--x"),
        ("[hosts.a]\nvenv = '/v'\nsite_packages = '/s'\n", "hosts.a"),
        ("[hosts.a]\n[hosts.b]\ngroup = 'a'\n", "hosts.b.group"),
        ("[hosts.a]\nserver = 'k'\n[hosts.b]\ngroup = 'k'\n", "hosts.b.group"),
    ],
)
def test_what_is_not_known_is_refused_with_file_and_key(tmp_path, text, named):
    path = write(tmp_path, text)
    with pytest.raises(UsageProblem) as refused:
        load_config(path)
    assert refused.value.where == str(path)
    assert refused.value.what.startswith(f"{named}: ")


def test_not_toml_and_missing_file(tmp_path):
    with pytest.raises(UsageProblem, match="not a TOML file"):
        load_config(write(tmp_path, "hosts = ["))
    with pytest.raises(UsageProblem, match="No such file"):
        load_config(tmp_path / "none.toml")


@pytest.mark.parametrize("name", ["", "-oProxyCommand=x"])
def test_a_host_name_cannot_be_an_option_of_ssh(tmp_path, name):
    with pytest.raises(UsageProblem):
        load_config(write(tmp_path, "")).select([name])


def test_api_key_comes_from_the_environment_and_is_never_part_of_the_settings(tmp_path, monkeypatch):
    endpoint = load_config(write(tmp_path, "[hosts.a.endpoint]\napi_key_env = 'THE_KEY'\n")).hosts["a"].endpoint
    monkeypatch.delenv("THE_KEY", raising=False)
    with pytest.raises(UsageProblem, match="THE_KEY"):
        endpoint.api_key()
    monkeypatch.setenv("THE_KEY", "s3cret")
    assert endpoint.api_key() == "s3cret" and "s3cret" not in repr(endpoint)


def test_a_host_is_found_by_its_address_too(tmp_path):
    file = tmp_path / "hosts.toml"
    file.write_text('[hosts.gpu1]\naddress = "10.1.2.200"\nvenv = "/opt/v"\n[hosts.gpu2]\naddress = "10.1.2.201"\n')
    (host,) = load_config(file).select(["10.1.2.200"])
    assert (host.name, host.venv) == ("gpu1", "/opt/v")
    file.write_text('[hosts.a]\naddress = "10.1.2.200"\n[hosts.b]\naddress = "10.1.2.200"\n')
    with pytest.raises(UsageProblem, match="a, b"):
        load_config(file).select(["10.1.2.200"])
