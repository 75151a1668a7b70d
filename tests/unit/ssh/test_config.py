"""Settings are those of ssh itself: whatever `ssh -G` makes of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from patcher.errors import HostUnreachable, UsageProblem
from patcher.ssh import config
from patcher.ssh.config import resolve


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write an ssh_config (and files that it includes) and make it the one that counts."""

    def write(text: str, **included: str) -> None:
        for name, content in included.items():
            (tmp_path / f"{name}.conf").write_text(content)
        (tmp_path / "config").write_text(text.replace("HERE", str(tmp_path)))
        monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(tmp_path / "config"))

    return write


def test_an_included_host_with_two_jumps(configure):
    configure(
        "Include HERE/*.conf\nHost *\n  User someone\n",
        site="""
        Host gpu
          HostName 10.0.0.7
          Port 2200
          User me
          IdentityFile /keys/%h-%r
          IdentityFile ~/second
          IdentitiesOnly yes
          ProxyJump outer,boss@inner:2022
          UserKnownHostsFile /known/one /known/two
          GlobalKnownHostsFile /known/all
          HostKeyAlias the-gpu
          ConnectTimeout 7
        Host outer
          HostName outer.example
          Port 2201
        Host inner
          IdentityFile /keys/inner
          ProxyJump never-used
    """,
    )
    target = resolve("gpu")
    assert (target.hostname, target.port, target.user) == ("10.0.0.7", 2200, "me")
    assert target.identity_files == (Path("/keys/10.0.0.7-me"), Path("~/second").expanduser())
    assert target.identities_only
    assert target.known_hosts == (Path("/known/one"), Path("/known/two"), Path("/known/all"))
    assert target.known_as == "the-gpu"
    assert target.connect_timeout == 7
    outer, inner = target.jumps
    assert (outer.hostname, outer.port, outer.user) == ("outer.example", 2201, "someone")
    assert (inner.hostname, inner.port, inner.user) == ("inner", 2022, "boss")
    assert inner.identity_files == (Path("/keys/inner"),)
    assert inner.jumps == outer.jumps == ()


def test_the_first_jump_has_jumps_of_its_own(configure):
    configure("Host gpu\n ProxyJump middle\nHost middle\n ProxyJump me@[::1]:2022\n")
    assert [(hop.hostname, hop.port) for hop in resolve("gpu").jumps] == [("::1", 2022), ("middle", 22)]


def test_match_criteria(configure):
    configure("""
        Match host gpu exec "true"
          Port 2200
        Match host gpu exec "false"
          User nobody
        Match originalhost gpu user me
          HostName by-user
    """)
    assert resolve("gpu", user="me").hostname == "by-user"
    assert resolve("gpu", user="you").hostname == "gpu"
    assert resolve("gpu", user="you").port == 2200
    assert resolve("gpu", user="you").user == "you"


def test_explicit_settings_win(configure):
    configure("Host gpu\n User me\n Port 2200\n")
    target = resolve("gpu", user="you", port=2201)
    assert (target.user, target.port) == ("you", 2201)


def test_a_host_without_any_entry(configure):
    configure("")
    target = resolve("gpu7.example")
    assert (target.hostname, target.port, target.jumps, target.proxy_command) == ("gpu7.example", 22, (), None)
    assert target.identity_files
    assert not target.identities_only


def test_jumps_and_commands_switched_off(configure):
    configure("Host gpu\n ProxyJump none\nHost other\n ProxyCommand none\nHost *\n ProxyJump outer\n")
    assert resolve("gpu").jumps == ()
    assert resolve("other").proxy_command is None


def test_a_proxy_command(configure, monkeypatch):
    monkeypatch.setenv("RELAY", "relay.example")
    configure('Host gpu\n HostName g\n Port 2200\n User me\n ProxyCommand nc -x ${RELAY} %h %p "%r" %n 100%%\n')
    assert resolve("gpu").proxy_command == 'nc -x relay.example g 2200 "me" gpu 100%'


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("", "/run/agent"),
        ("IdentityAgent none", None),
        ("IdentityAgent SSH_AUTH_SOCK", "/run/agent"),
        ("IdentityAgent $OTHER", "/run/other"),
        ("IdentityAgent /run/%r", "/run/me"),
    ],
)
def test_the_key_agent(configure, monkeypatch, setting: str, expected: str | None):
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    monkeypatch.setenv("OTHER", "/run/other")
    configure(f"Host gpu\n User me\n {setting}\n")
    assert resolve("gpu").identity_agent == expected


@pytest.mark.parametrize(("port", "expected"), [(22, "gpu7.example"), (2200, "[gpu7.example]:2200")])
def test_the_name_in_known_hosts(configure, port: int, expected: str):
    configure("Host gpu\n HostName GPU7.example\n")
    assert resolve("gpu", port=port).known_as == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Nonsense yes\n", "gpu"),
        ("", "-oProxyCommand=touch /tmp/x"),
        ("", "white space"),
        ("Host gpu\n ProxyJump gpu\n", "gpu"),
    ],
)
def test_what_ssh_refuses(configure, text: str, name: str):
    configure(text)
    with pytest.raises(UsageProblem) as failure:
        resolve(name)
    assert failure.value.detail


def test_jumps_that_never_end(configure):
    configure("Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    with pytest.raises(UsageProblem, match="never end"):
        resolve("a")


def test_a_missing_configuration_file(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(tmp_path / "none"))
    with pytest.raises(UsageProblem, match="refuses") as failure:
        resolve("gpu")
    assert "none" in failure.value.next_step


def test_no_ssh_client(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostUnreachable, match="no ssh client") as failure:
        config.resolve("gpu")
    assert failure.value.exit_code == 3
