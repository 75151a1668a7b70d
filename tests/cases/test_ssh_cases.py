"""Cases 24 to 32: the way to a host, through a real sshd and by the command line."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import make_package, make_series

from scripts.rig.sshd import Sshd
from tests.ssh_keys import RunningAgent, new_key


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pristine tree on "the host", whose series is the catalogue. No key agent, no terminal."""
    make_series(tmp_path / "series/sglang-0.5.11")
    monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(tmp_path / "series"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.chdir(tmp_path)
    return make_package(tmp_path / "site-packages")


@pytest.fixture
def ssh_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`ssh_config(text, server, ...)`: the text, then what each server's own file says, is the ssh_config that counts.

    The first value that ssh_config gives for a setting is the one that holds.
    """
    path = tmp_path / "ssh_config"

    def write(text: str, *servers: Sshd) -> Path:
        path.write_text("\n".join([text.replace("HERE", str(tmp_path)), *(s.ssh_config.read_text() for s in servers)]))
        monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(path))
        return path

    return write


def hashes(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(root.rglob("*")) if path.is_file()}


def run_line(line: str) -> None:
    """Do what a message says is to be typed."""
    subprocess.run(["sh", "-c", line], check=True, stdin=subprocess.DEVNULL, capture_output=True)


# ---------------------------------------------------------------- 24

BLOCK = """
Host {s.alias}
  HostName {s.address}
  Port {s.port}
  User {s.user}
  IdentityFile {s.client_key}
  IdentitiesOnly yes
  UserKnownHostsFile {s.known_hosts}
  GlobalKnownHostsFile /dev/null
"""
# What stands in front of the three hosts' own blocks (`decoy` is a port where nobody listens), and the jumps it means.
WAYS = {
    "include": ("Include HERE/conf.d/*\n", 2),
    "two jumps": ("Host gpu\n ProxyJump outer,inner\n", 2),
    "no jump": ("Host gpu\n ProxyJump none\nHost *\n ProxyJump outer\n", 0),
    "the jump's own jump": ("Host gpu\n ProxyJump inner\nHost inner\n ProxyJump outer\n", 2),
    "users and ports": ("Host gpu\n ProxyJump {o.user}@outer:{o.port},ssh://{i.user}@inner:{i.port}\n", 2),
    "only the first jump's own jump": ("Host gpu\n ProxyJump outer,inner\nHost inner\n ProxyJump nowhere\n", 2),
    "a command": ("Host gpu\n ProxyCommand ssh -F HERE/ssh_config -W %h:%p outer\n", 1),
    "match host": ("Match host gpu\n ProxyJump outer\nMatch host gp\n Port {decoy}\n", 1),
    "match originalhost and user": ("Match originalhost gpu user {g.user}\n ProxyJump outer\n"
                                    "Match originalhost gpu user nobody-else\n Port {decoy}\n", 1),
    "match localuser": ("Match host gpu localuser {g.user}\n ProxyJump outer\n", 1),
    "match exec": ('Match host gpu exec "test -d HERE"\n ProxyJump outer\n'
                   'Match host gpu exec "test -d HERE/none"\n Port {decoy}\n', 1),
    "match exec with tokens": ('Match exec "test %n = gpu"\n ProxyJump outer\n', 1),
    "match final": ("Match final originalhost gpu\n ProxyJump outer\n Port {decoy}\n", 1),
    "negated": ("Match host gpu !exec false\n ProxyJump outer\nHost * !gpu !outer\n Port {decoy}\n", 1),
    "the first value": ("Host gpu\n Port {g.port}\n ProxyJump outer\nHost gpu\n Port {decoy}\n ProxyJump inner\n", 1),
    "tokens": ("Host gpu\n ProxyCommand ssh -F HERE/ssh_config -W 127.0.0.1:%p %n-%r\nHost gpu-{g.user}\n"
               " ProxyJump none\n HostName 127.0.0.2\n Port {i.port}\n IdentityFile {i.client_key}\n"
               " UserKnownHostsFile {i.known_hosts}\n", 1),
}


@pytest.fixture(scope="module")
def three_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sshd]]:
    """gpu, and two that may be jumped through."""
    folder = tmp_path_factory.mktemp("three")
    names = {"gpu": "127.0.0.1", "outer": "127.0.0.1", "inner": "127.0.0.2"}
    servers = [Sshd(folder / name, alias=name, address=address) for name, address in names.items()]
    yield servers
    for server in servers:
        server.stop()


@pytest.mark.parametrize("way", WAYS)
def test_case_24_ssh_config(three_servers, tree, tool, ssh_config, tmp_path, way):
    """The tool goes the very way that `ssh gpu` goes: each sshd sees as many logins from the one as from the other."""
    goal, outer, inner = three_servers
    text, jumps = WAYS[way]
    text = text.format(g=goal, o=outer, i=inner, decoy=1)
    if way == "include":
        folder = tmp_path / "conf.d"
        folder.mkdir()
        (folder / "10-site.conf").write_text("Host gpu\n  ProxyJump outer,inner\n" + BLOCK.format(s=goal))
        (folder / "20-jumps.conf").write_text(BLOCK.format(s=outer) + BLOCK.format(s=inner))
        config = ssh_config(text)
    else:
        config = ssh_config(text, goal, outer, inner)

    def logins() -> list[int]:
        return [server.log.read_text().count("Accepted publickey") for server in (goal, outer, inner)]

    start = logins()
    subprocess.run(["ssh", "-F", config, "-o", "BatchMode=yes", "gpu", "true"], check=True, capture_output=True,
                   timeout=60)
    between = logins()
    said = tool("status", "--host", "gpu", "--site-packages", tree, "--json")
    assert said.code == 0, said.stderr
    assert said.host["state"] == "pristine"
    by_ssh = [now - before for now, before in zip(between, start, strict=True)]
    assert [now - before for now, before in zip(logins(), between, strict=True)] == by_ssh
    assert sum(by_ssh) == 1 + jumps


@pytest.mark.parametrize(("text", "what"), [
    ("Host gpu\n ProxyJump gpu\n", "jumphost loop"), ("Host gpu\n ProxyJump a\nHost a\n ProxyJump gpu\n", "never end"),
    ("Nonsense yes\n", "bad configuration"), ("Match nonsense gpu\n", "Match"),
    ("Host *\n ProxyJump outer\n", "jumphost loop"), ("Host gpu\n ProxyJump a:b:c\n", "ProxyJump"),
])
def test_case_24_what_ssh_refuses(tree, tool, ssh_config, text, what):
    ssh_config(text)
    said = tool("status", "--host", "gpu", "--site-packages", tree, "--json")
    assert said.code == 2, said.stderr
    assert what.lower() in (said.error["what"] + said.error["detail"]).lower() and "ssh -G" in said.error["next"]


# ---------------------------------------------------------------- 25

@pytest.fixture
def agent(tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningAgent]:
    """The user's key agent, with eight keys that no server here takes."""
    running = RunningAgent(tmp_path)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(running.socket))
    for number in range(8):
        running.add(new_key(tmp_path / f"key{number}"))
    yield running
    running.stop()


@pytest.mark.parametrize(("only", "key"), [
    ("yes", "file"), ("yes", "agent"), ("no", "file"), ("no", "agent"), ("yes", "agent alone"), ("no", "agent alone")])
def test_case_25_many_keys(sshd, tree, tool, ssh_config, agent, only, key):
    """Three attempts. `agent`: its public half is on disk, as IdentityFile; `agent alone`: it is the agent's ninth."""
    server = sshd(alias="gpu", extra="MaxAuthTries 3")
    config = ssh_config(f"Host gpu\n IdentitiesOnly {only}\n", server)
    if key != "file":
        agent.add(server.client_key)
        server.client_key.unlink()
    if key == "agent alone":
        server.stop()
        server.client_key.with_suffix(".pub").rename(server.home / "authorized")
        settings = server.home / "sshd_config"
        settings.write_text(settings.read_text().replace("client_key.pub", "authorized"))
        server.start()
    by_ssh = subprocess.run(["ssh", "-F", config, "-o", "BatchMode=yes", "gpu", "true"], capture_output=True,
                            check=False, timeout=60).returncode
    said = tool("status", "--host", "gpu", "--site-packages", tree, "--json")
    assert said.code == (3 if key == "agent alone" else 0), said.stderr
    # Where ssh offers all that the agent holds before a named key that it does not hold, this tool gets in.
    assert by_ssh == (255 if key == "agent alone" or (only, key) == ("no", "file") else 0)
    if said.code:
        assert said.error["error"] == "AuthenticationProblem" and said.error["where"] == "gpu"
        # Too many of the agent's keys: name the one that counts. None that may be offered: let ssh work first.
        assert ("IdentitiesOnly yes" if only == "no" else "make `ssh ") in said.error["next"]


KINDS = [("ed25519", ()), ("rsa", ("-m", "PEM")), ("ecdsa", ("-m", "PKCS8"))]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=[" ".join([kind, *options]) for kind, options in KINDS])
def test_case_25_an_encrypted_key_without_a_terminal(sshd, tree, tool, ssh_config, agent, kind, options):
    server = sshd(alias="gpu")
    key = new_key(server.home / f"my key.{kind}", kind, "secret", *options)
    shutil.copy(f"{key}.pub", server.home / "client_key.pub")
    server.client_key.unlink()
    ssh_config(f'Host gpu\n IdentityFile "{key}"\n', server)
    said = tool("status", "--host", "gpu", "--site-packages", tree, "--json")
    assert said.code == 3 and said.error["error"] == "AuthenticationProblem", said.stderr
    assert said.error["next"] == f"unlock the key in an agent first: ssh-add '{key}'"
    agent.add(key, "secret")
    assert tool("status", "--host", "gpu", "--site-packages", tree).code == 0


# ---------------------------------------------------------------- 26

class Known:
    """What known_hosts has for the server, and what the message says first. `cut`: the entry's shape is changed."""

    def __init__(self, server: Sshd) -> None:
        self.server = server
        self.name = f"[127.0.0.1]:{server.port}"
        self.key = server.known_hosts.read_text().split(" ", 1)[1]

    def other_key(self, kind: str = "ed25519") -> str:
        path = new_key(self.server.home / f"other-{kind}", kind)
        return path.with_suffix(".pub").read_text()

    def write(self, *lines: str, hashed: bool = False) -> None:
        self.server.known_hosts.write_text("".join(f"{line.strip()}\n" for line in lines))
        if hashed:
            subprocess.run(["ssh-keygen", "-q", "-H", "-f", self.server.known_hosts], check=True, capture_output=True)
            self.server.known_hosts.with_name("known_hosts.old").unlink()


HOST_KEYS = {
    "unknown": (lambda k: k.write(), "not known"),
    "another host's": (lambda k: k.write(f"127.0.0.9 {k.key}"), "not known"),
    "another port's": (lambda k: k.write(f"[127.0.0.1]:4 {k.key}"), "not known"),
    "another port's, hashed": (lambda k: k.write(f"[127.0.0.1]:4 {k.key}", hashed=True), "not known"),
    "the name's own, changed": (lambda k: k.write(f"127.0.0.1 {k.other_key()}"), "not known"),
    "changed": (lambda k: k.write(f"{k.name} {k.other_key()}"), "changed"),
    "changed, hashed": (lambda k: k.write(f"{k.name} {k.other_key()}", hashed=True), "changed"),
    "changed, by pattern": (lambda k: k.write(f"[127.*]:{k.server.port} {k.other_key()}"), "changed"),
    "another type": (lambda k: k.write(f"{k.name} {k.other_key('ecdsa')}"), "but not the ssh-ed25519 key"),
    "another type, hashed": (lambda k: k.write(f"{k.name} {k.other_key('rsa')}", hashed=True), "but not the"),
    "revoked": (lambda k: k.write(f"{k.name} {k.key}", f"@revoked * {k.key}"), "revokes"),
    "an authority": (lambda k: k.write(f"@cert-authority {k.name} {k.other_key()}"), "certificates are not checked"),
}


@pytest.mark.parametrize("kind", HOST_KEYS)
def test_case_26_host_key(sshd, tree, tool, ssh_config, kind):
    """Exit code 3, nothing is accepted, and the line that the message gives is all that is needed."""
    server = sshd(alias="gpu")
    config = ssh_config("", server)
    write, what = HOST_KEYS[kind]
    write(Known(server))
    before = hashes(server.home)
    assert subprocess.run(["ssh", "-F", config, "-o", "BatchMode=yes", "gpu", "true"], capture_output=True, check=False,
                          timeout=60).returncode == 255
    said = tool("apply", "--host", "gpu", "--site-packages", tree, "--json")
    assert (said.code, said.error["error"], said.error["where"]) == (3, "HostKeyProblem", "gpu")
    assert what in said.error["what"] and "SHA256:" in said.error["detail"]
    assert {**hashes(server.home), "sshd.log": ""} == {**before, "sshd.log": ""}
    assert "Accepted" not in server.log.read_text()
    advice, _, line = said.error["next"].partition(": ")
    if kind == "revoked":
        assert advice.startswith("do not connect")
        return
    forget = f"ssh-keygen -R '[127.0.0.1]:{server.port}' -f {server.known_hosts} && "
    add = f"ssh-keyscan -p {server.port} 127.0.0.1 >> {server.known_hosts}"
    assert line == (forget if what == "changed" else "") + add
    if kind == "changed, by pattern":
        server.known_hosts.write_text("")  # no line of ssh-keygen takes a pattern's entry away
    run_line(line)
    assert tool("status", "--host", "gpu", "--site-packages", tree).code == 0


@pytest.mark.parametrize("name", ["/dev/null", "none", "/dev/null /dev/null"])
def test_case_26_a_known_hosts_file_that_keeps_nothing(sshd, tree, tool, ssh_config, name):
    server = sshd(alias="gpu")
    ssh_config(f"Host gpu\n UserKnownHostsFile {name}\n StrictHostKeyChecking no\n", server)
    said = tool("status", "--host", "gpu", "--site-packages", tree, "--json")
    assert (said.code, said.error["error"]) == (3, "HostKeyProblem")
    assert "name a UserKnownHostsFile for gpu in ssh_config" in said.error["next"]
    assert f"ssh-keyscan -p {server.port} 127.0.0.1 >> {Path.home()}/.ssh/known_hosts" in said.error["next"]


def test_case_26_known_hosts_with_blanks_in_its_path(sshd, tree, tool, ssh_config, tmp_path):
    server = sshd(alias="gpu")
    folder = tmp_path / "known hosts of  mine"
    folder.mkdir()
    ssh_config(f'Host gpu\n UserKnownHostsFile "{folder}/a file" {tmp_path}/second\n', server)
    said = tool("status", "--host", "gpu", "--site-packages", tree, "--json")
    assert said.code == 3
    run_line(said.error["next"].partition(": ")[2])
    assert (folder / "a file").exists() and not (tmp_path / "second").exists()
    assert tool("status", "--host", "gpu", "--site-packages", tree).code == 0


@pytest.mark.parametrize(("where", "kind"), [("gpu", "unknown"), ("inner", "changed"), ("outer", "unknown")])
def test_case_26_behind_jumps(three_servers, tree, tool, ssh_config, where, kind):
    """ssh-keyscan does not reach it; the line that is given does."""
    ssh_config("Host gpu\n ProxyJump outer,inner\n", *three_servers)
    server = next(server for server in three_servers if server.alias == where)
    kept = server.known_hosts.read_text()
    stranger = new_key(server.home / f"stranger-{kind}").with_suffix(".pub").read_text()
    server.known_hosts.write_text(f"[{server.address}]:{server.port} {stranger}" if kind == "changed" else "")
    try:
        said = tool("status", "--host", "gpu", "--site-packages", tree, "--json")
        assert (said.code, said.error["error"], said.error["where"]) == (3, "HostKeyProblem", where)
        line = said.error["next"].partition(": ")[2]
        assert ("ssh-keygen -R" in line) is (kind == "changed") and ("ssh-keyscan" in line) is (where == "outer")
        run_line(line)
        assert tool("status", "--host", "gpu", "--site-packages", tree).code == 0
    finally:
        server.known_hosts.write_text(kept)
