"""Cases 24 to 32: the way to a host, through a real sshd and by the command line."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from scripts.rig.sshd import Sshd
from tests.support.builders import DDTREE, PRISTINE, STAGES, make_package, make_series
from tests.support.relay import Relay
from tests.support.ssh_keys import RunningAgent, new_key
from tests.support.stub_host import StubHost


def more_of(names: Iterable[str], *rest: str) -> list:
    """The names as parameters; `rest` are more of the same kind, for the long run."""
    return [pytest.param(name, marks=pytest.mark.long if name in rest else ()) for name in names]


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
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


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
    "match originalhost and user": (
        "Match originalhost gpu user {g.user}\n ProxyJump outer\n"
        "Match originalhost gpu user nobody-else\n Port {decoy}\n",
        1,
    ),
    "match localuser": ("Match host gpu localuser {g.user}\n ProxyJump outer\n", 1),
    "match exec": (
        'Match host gpu exec "test -d HERE"\n ProxyJump outer\n'
        'Match host gpu exec "test -d HERE/none"\n Port {decoy}\n',
        1,
    ),
    "match exec with tokens": ('Match exec "test %n = gpu"\n ProxyJump outer\n', 1),
    "match final": ("Match final originalhost gpu\n ProxyJump outer\n Port {decoy}\n", 1),
    "negated": ("Match host gpu !exec false\n ProxyJump outer\nHost * !gpu !outer\n Port {decoy}\n", 1),
    "the first value": ("Host gpu\n Port {g.port}\n ProxyJump outer\nHost gpu\n Port {decoy}\n ProxyJump inner\n", 1),
    "tokens": (
        "Host gpu\n ProxyCommand ssh -F HERE/ssh_config -W 127.0.0.1:%p %n-%r\nHost gpu-{g.user}\n"
        " ProxyJump none\n HostName 127.0.0.2\n Port {i.port}\n IdentityFile {i.client_key}\n"
        " UserKnownHostsFile {i.known_hosts}\n",
        1,
    ),
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


@pytest.mark.parametrize(
    "way",
    more_of(
        WAYS,
        "no jump",
        "users and ports",
        "only the first jump's own jump",
        "match originalhost and user",
        "match localuser",
        "match exec with tokens",
        "the first value",
        "tokens",
    ),
)
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
    subprocess.run(
        ["ssh", "-F", config, "-o", "BatchMode=yes", "gpu", "true"], check=True, capture_output=True, timeout=60
    )
    between = logins()
    said = tool("status", "--host", "gpu", "--site-packages", tree, "--json")
    assert said.code == 0, said.stderr
    assert said.host["state"] == "pristine"
    by_ssh = [now - before for now, before in zip(between, start, strict=True)]
    assert [now - before for now, before in zip(logins(), between, strict=True)] == by_ssh
    assert sum(by_ssh) == 1 + jumps


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("Host gpu\n ProxyJump gpu\n", "jumphost loop"),
        ("Host gpu\n ProxyJump a\nHost a\n ProxyJump gpu\n", "never end"),
        ("Nonsense yes\n", "bad configuration"),
        ("Match nonsense gpu\n", "Match"),
        ("Host *\n ProxyJump outer\n", "jumphost loop"),
        ("Host gpu\n ProxyJump a:b:c\n", "ProxyJump"),
    ],
)
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


@pytest.mark.parametrize(
    ("only", "key"),
    [
        ("yes", "file"),
        ("no", "agent"),
        ("no", "agent alone"),
        *(
            pytest.param(*more, marks=pytest.mark.long)
            for more in (("yes", "agent"), ("no", "file"), ("yes", "agent alone"))
        ),
    ],
)
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
    by_ssh = subprocess.run(
        ["ssh", "-F", config, "-o", "BatchMode=yes", "gpu", "true"], capture_output=True, check=False, timeout=60
    ).returncode
    said = tool("status", "--host", "gpu", "--site-packages", tree, "--json")
    assert said.code == (3 if key == "agent alone" else 0), said.stderr
    # Where ssh offers all that the agent holds before a named key that it does not hold, this tool gets in.
    assert by_ssh == (255 if key == "agent alone" or (only, key) == ("no", "file") else 0)
    if said.code:
        assert said.error["error"] == "AuthenticationProblem" and said.error["where"] == "gpu"
        # Too many of the agent's keys: name the one that counts. None that may be offered: let ssh work first.
        assert ("IdentitiesOnly yes" if only == "no" else "make `ssh ") in said.error["next"]


@pytest.mark.parametrize("form", more_of(["ed25519", "rsa -m PEM", "ecdsa -m PKCS8"], "rsa -m PEM", "ecdsa -m PKCS8"))
def test_case_25_an_encrypted_key_without_a_terminal(sshd, tree, tool, ssh_config, agent, form):
    kind, *options = form.split()
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


@pytest.mark.parametrize(
    "kind",
    more_of(HOST_KEYS, "another host's", "another port's, hashed", "changed, by pattern", "another type, hashed"),
)
def test_case_26_host_key(sshd, tree, tool, ssh_config, kind):
    """Exit code 3, nothing is accepted, and the line that the message gives is all that is needed."""
    server = sshd(alias="gpu")
    config = ssh_config("", server)
    write, what = HOST_KEYS[kind]
    write(Known(server))
    before = hashes(server.home)
    assert (
        subprocess.run(
            ["ssh", "-F", config, "-o", "BatchMode=yes", "gpu", "true"], capture_output=True, check=False, timeout=60
        ).returncode
        == 255
    )
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


@pytest.mark.parametrize("name", more_of(["/dev/null", "none", "/dev/null /dev/null"], "/dev/null /dev/null"))
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


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("inner", "changed"),
        *(pytest.param(*more, marks=pytest.mark.long) for more in (("gpu", "unknown"), ("outer", "unknown"))),
    ],
)
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


# ---------------------------------------------------------------- 27

NOISE = {
    "lines": "echo 'Welcome to gpu'; echo 'your quota is 93 %' >&2",
    "no line end": "printf 'loading modules ...'",
    "terminal escapes": r"printf '\033[2J\033]0;gpu\007'; stty erase x; printf '\033[31m' >&2",
    "bytes": r"head -c 300000 /dev/urandom; head -c 300000 /dev/urandom >&2",
    "another reply": 'echo "<<ddtree-agent 00000000000000000000000000000000 12>>"; echo \'{"error": 1}\'; echo "{}"',
    "on leaving": "trap 'echo bye; echo bye >&2' EXIT",
    "shell options": "set -u; shopt -s nocasematch; cd /; umask 077; alias python3=false",
}


@pytest.fixture
def noisy(sshd, ssh_config, tmp_path: Path) -> Callable[[str], Sshd]:
    """`noisy(text)`: an sshd with a banner, whose bash reads that text as the .bashrc of a home of its own."""
    shell = pwd.getpwuid(os.getuid()).pw_shell
    if not shell.endswith("bash"):
        pytest.skip(f"the login shell of this user is {shell}, which reads no .bashrc")

    def start(text: str) -> Sshd:
        (tmp_path / "home").mkdir()
        (tmp_path / "home/.bashrc").write_text(f"{text}\n")
        banner = tmp_path / "banner"
        banner.write_bytes(b"<<ddtree-agent>> Authorised use only\xff\n" * 100)
        server = sshd(alias="gpu", extra=f"Banner {banner}\nSetEnv HOME={tmp_path / 'home'}")
        config = ssh_config("", server)
        done = subprocess.run(["ssh", "-F", config, "gpu", "echo .bashrc:$HOME"], capture_output=True, check=False)
        assert b"Authorised use only" in done.stderr
        return server

    return start


@pytest.mark.parametrize(
    "noise", more_of(NOISE, "no line end", "terminal escapes", "another reply", "on leaving", "shell options")
)
def test_case_27_noise(noisy, tree, tool, noise):
    noisy(NOISE[noise])
    said = tool("apply", "--host", "gpu", "--site-packages", tree, "--json")
    assert said.code == 0, said.stderr
    assert said.host["changed"] and "Welcome" not in said.stdout
    assert "\033" not in said.stdout + said.stderr
    assert {(tree / path).stat().st_mode & 0o777 for path in PRISTINE if (tree / path).exists()} == {0o644}
    assert tool("revert", "--host", "gpu", "--site-packages", tree).code == 0


@pytest.mark.parametrize(
    "text", more_of(["exit 0", "read line; echo $line", "cat > /dev/null", "exec true"], "cat > /dev/null", "exec true")
)
def test_case_27_a_login_that_runs_no_program(noisy, tree, tool, text):
    """It is said what is wrong, and no write was begun."""
    noisy(text)
    said = tool("apply", "--host", "gpu", "--site-packages", tree, "--json")
    assert said.code == 3, said.stderr
    assert ".bashrc" in said.error["next"]
    assert not (tree / ".ddtree-patch").exists()


# ---------------------------------------------------------------- 28


def started_by_hand(host: StubHost) -> tuple[str, str]:
    """(stop, restart) commands of an operator, who lets the server run in the background and redirects nothing."""
    server = f"{host.venv}/bin/python -m sglang.launch_server --port {host.port}"
    stop = f"pid=$(cat {host.home}/pid) && kill $pid; while kill -0 $pid 2>/dev/null; do sleep 0.1; done"
    return stop, f"{stop}; cd {host.home}; {server} & echo $! > {host.home}/pid"


@pytest.mark.parametrize(
    "kind", more_of(["process", "command", "command, setsid", "command, nohup"], "command, setsid", "command, nohup")
)
def test_case_28_start(stub_host, sshd, ssh_config, tool, kind):
    """The start returns, though the server goes on; and the server outlives the connection, with lines left to log."""
    server = sshd(alias="gpu")
    ssh_config("", server)
    stub_host.misbehave(always=["--stub-mode", "greedy"])  # it has something to log
    first = stub_host.start_server()
    (stub_host.home / "pid").write_text(str(first.pid))
    threading.Thread(target=first.wait, daemon=True).start()  # else its zombie stays, which `kill -0` finds
    config = stub_host.configure("gpu")
    if kind != "process":
        stop, restart = started_by_hand(stub_host)
        around = kind.partition(", ")[2]
        restart = restart.replace(f"; {stub_host.venv}", f"; {around} {stub_host.venv}") if around else restart
        settings = {"kind": "command", "restart": ["bash", "-c", restart], "stop": ["bash", "-c", stop]}
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        text = config.read_text()
        config.write_text(text.partition("[hosts.gpu.service]")[0] + f"[hosts.gpu.service]\n{lines}")
    said = tool("restart", "--host", "gpu", "--config", config, "--json")
    assert said.code == 0, said.stderr
    server.stop()  # and with it every connection
    assert said.host["ready"]["pid"] != first.pid
    assert stub_host.info()["cwd"] == str(stub_host.home)
    asked = {"text": "a", "sampling_params": {"temperature": 1.0, "max_new_tokens": 8}}
    web = http.client.HTTPConnection("127.0.0.1", stub_host.port, timeout=60)
    web.request("POST", "/generate", json.dumps(asked))
    assert json.load(web.getresponse())["meta_info"]["completion_tokens"] == 8
    web.close()


# ---------------------------------------------------------------- 29


def may_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


PYTHON = "/usr/bin/python3"  # that every account may run
needs_accounts = pytest.mark.skipif(
    not may_mount() or shutil.which("sudo") is None or not Path(PYTHON).exists(),
    reason="needs sudo, the system's Python, and root that may make a namespace",
)
LOGIN, OWNER = 61001, 61002
BIND = """
for name in passwd shadow sudoers; do mount --bind "$0/$name" /etc/$name || exit 1; done
exec "$@"
"""


class Shared:
    """A stub installation that belongs to the account `owner`, its server as well, and the login of another, `login`.

    Both accounts, and a sudoers file, exist only in the mount namespace of an sshd.
    """

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)  # every account may look into it
        (folder / "target").mkdir()
        self.target = StubHost(folder / "target", PYTHON)
        home = folder / "home"
        home.mkdir()
        accounts = f"login:x:{LOGIN}:{LOGIN}::{home}:/bin/bash\nowner:x:{OWNER}:{OWNER}::{home}:/bin/bash\n"
        (folder / "passwd").write_text(Path("/etc/passwd").read_text() + accounts)
        (folder / "shadow").write_text("".join(f"{name}:*:19000:0:99999:7:::\n" for name in ("root", "login", "owner")))
        self.sudoers = folder / "sudoers"
        self.sudoers.touch(0o440)
        self.allow("root ALL=(ALL) ALL")
        subprocess.run(["chown", "-R", f"{OWNER}:{OWNER}", self.target.home], check=True)
        self.folder = folder
        self._sshd: Sshd | None = None

    def make_sshd(self, extra: str = "") -> Sshd:
        around = ["unshare", "--mount", "sh", "-c", BIND, str(self.folder)]
        self._sshd = Sshd(self.folder / "sshd", alias="gpu", user="login", around=around, extra=extra)
        return self._sshd

    def stop(self) -> None:
        self.target.stop()
        if self._sshd:
            self._sshd.stop()

    def allow(self, *lines: str) -> None:
        """Write the sudoers file, in place: it is bound where it is."""
        self.sudoers.write_text("".join(f"{line}\n" for line in lines))

    def configure(self, sudo: bool, venv: bool = True) -> Path:
        path = self.target.configure("gpu")
        text = path.read_text().replace("[hosts.gpu]", f"[hosts.gpu]\nsudo = {json.dumps(sudo)}")
        path.write_text(text if venv else text.replace(f'venv = "{self.target.venv}"\n', ""))
        return path

    def start_server(self) -> subprocess.Popen:
        argv = [
            "setpriv",
            f"--reuid={OWNER}",
            f"--regid={OWNER}",
            "--clear-groups",
            f"{self.target.venv}/bin/python",
            "-m",
            "sglang.launch_server",
            "--port",
            str(self.target.port),
        ]
        server = subprocess.Popen(
            argv,
            cwd=self.target.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        threading.Thread(target=server.wait, daemon=True).start()
        self.target.wait_answer()
        return server


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    with tempfile.TemporaryDirectory(prefix="ddtree-case-29-") as folder:  # pytest's own are closed to other accounts
        shared = Shared(Path(folder))
        monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(shared.target.series_root))
        monkeypatch.chdir(tmp_path)
        yield shared
        shared.stop()


def owners(root: Path) -> set[int]:
    return {path.lstat().st_uid for path in (root, *root.rglob("*"))}


@needs_accounts
def test_case_29_sudo_for_one_interpreter(shared, ssh_config, tool):
    """Files and server of another account: all of it works, and stays that account's."""
    target = shared.target
    shared.allow(f"login ALL=(root) NOPASSWD: {target.venv}/bin/python3")
    ssh_config("", shared.make_sshd())
    config = shared.configure(sudo=True)
    first, before = shared.start_server(), target.hashes()
    said = tool("apply", "--host", "gpu", "--config", config, "--json")
    assert said.code == 0, said.stderr
    assert target.served_identity() == target.series.identity("temperature")
    pid = said.host["ready"]["pid"]
    assert pid != first.pid and os.stat(f"/proc/{pid}").st_uid == OWNER
    assert {(target.site_packages / path).stat().st_uid for path in target.series.files} == {OWNER}
    back = tool("revert", "--host", "gpu", "--config", config, "--json")
    assert back.code == 0, back.stderr
    assert target.hashes() == before and target.served_identity() is None
    assert owners(target.site_packages) == {OWNER}


@needs_accounts
def test_case_29_without_sudo(shared, ssh_config, tool):
    """Said before anything is written: whose the files are, and the setting that helps."""
    ssh_config("", shared.make_sshd())
    shared.start_server()
    before = shared.target.hashes()
    said = tool("apply", "--host", "gpu", "--config", shared.configure(sudo=False), "--json")
    assert said.code in (3, 4), said.stderr
    assert "sudo = true" in said.error["next"]
    assert shared.target.hashes() == before and shared.target.served_identity() is None
    assert owners(shared.target.venv) == {OWNER}


@needs_accounts
@pytest.mark.parametrize(
    ("rule", "venv"),
    [
        ("login ALL=(ALL) ALL", True),  # with a password
        pytest.param("# nothing for this account", True, marks=pytest.mark.long),
        ("login ALL=(root) NOPASSWD: {venv}/bin/python", False),  # and the tool does not know of that interpreter
        pytest.param("login ALL=(owner) NOPASSWD: {venv}/bin/python3", True, marks=pytest.mark.long),  # not as root
    ],
    ids=["password", "not in sudoers", "another interpreter", "another account"],
)
def test_case_29_what_sudo_refuses(shared, ssh_config, tool, rule, venv):
    """The message holds the line that sudoers lacks; with it, it works."""
    shared.allow("root ALL=(ALL) ALL", rule.format(venv=shared.target.venv))
    ssh_config("", shared.make_sshd())
    options = ("status", "--host", "gpu", "--config", shared.configure(sudo=True, venv=venv), "--json")
    said = tool(*options)
    assert (said.code, said.error["error"], said.error["where"]) == (3, "AuthenticationProblem", "gpu"), said.stderr
    program = f"{shared.target.venv}/bin/python3" if venv else r"/\S+/python3"
    found = re.search(rf"allow it in sudoers: (login ALL=\(root\) NOPASSWD: {program}) - ", said.error["next"])
    assert found, said.error["next"]
    if not venv:
        assert f"{shared.target.venv}/bin/python" in said.error["detail"], "which one sudo does allow"
        assert "--venv" in said.error["next"]
        return
    with shared.sudoers.open("a") as sudoers:
        sudoers.write(f"{found[1]}\n")
    assert tool(*options).code == 0


@needs_accounts
def test_case_29_no_sudo_there(shared, ssh_config, tool):
    ssh_config("", shared.make_sshd(extra="SetEnv PATH=/nowhere"))
    said = tool("status", "--host", "gpu", "--config", shared.configure(sudo=True), "--json")
    assert said.code == 3 and "there is no sudo on the host" in said.error["what"], said.stderr


# ---------------------------------------------------------------- 30


def behind(relay: Relay, server: Sshd) -> str:
    return f"Host gpu\n Port {relay.port}\n HostKeyAlias [127.0.0.1]:{server.port}\n"


def when(happened: Callable[[], object], act: Callable[[], None]) -> None:
    """On a thread of its own, do it once that has happened."""

    def wait() -> None:
        while not happened():
            time.sleep(0.02)
        act()

    threading.Thread(target=wait, daemon=True).start()


def test_case_30_lost_in_the_upload(sshd, tree, tool, ssh_config, tmp_path):
    big = "".join(f"# {os.urandom(48).hex()}\n" for _ in range(15_000)).encode()
    make_series(tmp_path / "big/sglang-0.5.11", stages={**STAGES, "ddtree": {**DDTREE, "sglang/srt/big.py": big}})
    (tmp_path / "series").rename(tmp_path / "small")
    (tmp_path / "big").rename(tmp_path / "series")
    before = hashes(tree)
    server = sshd(alias="gpu")
    options = ("--host", "gpu", "--site-packages", tree, "--json")
    with Relay(server.port, cut_when=lambda relay: relay.up > 1_000_000) as relay:
        ssh_config(behind(relay, server), server)
        said = tool("apply", *options)
    assert (said.code, said.error["error"]) == (3, "HostUnreachable"), said.stderr
    assert {step["name"]: step["state"] for step in said.host["steps"]}["commit"] == "failed"
    assert "says where" in said.error["next"]
    assert hashes(tree) == before and not (tree / ".ddtree-patch").exists()
    ssh_config("", server)
    assert tool("status", *options).host["state"] == "pristine"
    assert tool("apply", *options).code == 0
    assert (tree / "sglang/srt/big.py").read_bytes() == big


@pytest.mark.parametrize(
    ("step", "state", "recovered"),
    [("rename:2", "pristine", "undone"), pytest.param("clean", "temperature", "finished", marks=pytest.mark.long)],
)
def test_case_30_lost_during_the_renames(sshd, tree, tool, ssh_config, step, state, recovered):
    """The host ends what the lost session had started, as many do: the agent is killed at that step."""
    options = ("--host", "gpu", "--site-packages", tree, "--json")
    before = hashes(tree)
    ssh_config("", sshd(alias="gpu", extra=f"SetEnv DDTREE_AGENT_DIE_AT={step}"))
    said = tool("apply", *options)
    assert (said.code, said.error["error"]) == (3, "HostUnreachable"), said.stderr
    ssh_config("", sshd(alias="gpu"))
    said = tool("status", *options)
    assert said.code == 0 and said.host["state"] == state
    assert said.host["installation"]["recovered"] == recovered
    assert f"a commit that was cut short before was {recovered}" in said.host["steps"][0]["detail"]
    assert not [path for path in tree.rglob("*") if ".ddtree-new" in path.name or path.name == "journal.json"]
    assert tool("apply", *options).code == 0
    assert tool("status", *options).host["state"] == "temperature"
    assert tool("revert", *options).code == 0 and hashes(tree) == before


def test_case_30_lost_while_the_host_commits_on(stub_host, sshd, ssh_config, tool):
    """The line is cut in the import check, when every file has its new bytes: the agent ends what it began."""
    started, go = stub_host.home / "started", stub_host.home / "go"
    state = stub_host.venv / ".ddtree-patch/sglang"
    (stub_host.site_packages / "sitecustomize.py").write_text(
        "import pathlib, time\n"
        f"if pathlib.Path({str(state / 'journal.json')!r}).exists():\n"
        f"    pathlib.Path({str(started)!r}).touch()\n"
        f"    while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\n"
    )
    server = sshd(alias="gpu")
    options = ("--host", "gpu", "--config", stub_host.configure("gpu"), "--json")
    with Relay(server.port) as relay:
        when(started.exists, relay.cut)
        ssh_config(behind(relay, server), server)
        said = tool("apply", *options)
    assert (said.code, said.error["error"]) == (3, "HostUnreachable"), said.stderr
    ssh_config("", server)
    go.touch()
    deadline = time.monotonic() + 60
    while (state / "lock").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    said = tool("status", *options)
    assert (said.host["state"], said.host["receipt_state"]) == ("temperature", "valid"), said.stderr
    assert tool("revert", *options).code == 0


def test_case_30_lost_while_waiting_for_readiness(stub_host, sshd, ssh_config, tool):
    """The files are new, the server is on its way: nothing is undone behind the operator's back, and it is said."""
    go, logs = stub_host.home / "go", stub_host.venv / ".ddtree-patch/sglang/logs"
    stub_host.start_server()
    stub_host.misbehave(patched=["--stub-ready-file", str(go)])
    server = sshd(alias="gpu")
    options = ("--host", "gpu", "--config", stub_host.configure("gpu"), "--json")
    with Relay(server.port) as relay:
        when(lambda: any("stub server" in log.read_text() for log in logs.glob("server-*.log")), relay.cut)
        ssh_config(behind(relay, server), server)
        said = tool("apply", *options)
    assert (said.code, said.error["error"]) == (3, "HostUnreachable"), said.stderr
    assert "ddtree-patch status says where it stands: apply again, or revert" in said.error["next"]
    assert said.host["changed"]
    ssh_config("", server)
    assert tool("status", *options).host["state"] == "temperature"
    go.touch()
    stub_host.wait_answer()
    again = tool("apply", *options)
    assert again.code == 0 and not again.host["changed"], again.stderr
    assert any("ddtree-patch smoke-test runs it" in line for line in again.host["not_done"])
    assert tool("smoke-test", *options).code == tool("verify", *options).code == 0
    assert stub_host.served_identity() == stub_host.series.identity("temperature")
    assert tool("revert", *options).code == 0 and stub_host.served_identity() is None


# ---------------------------------------------------------------- 31

# How often the tool may wait for the host's answer: the login takes 5 turns or so, each request of the agent 3.
TURNS = {"status": 12, "apply --dry-run": 12, "apply": 15, "revert": 15}


def test_case_31_a_slow_link(sshd, tree, tool, ssh_config):
    """Every piece of the conversation is under way for a while, so that what can travel together does."""
    server = sshd(alias="gpu")
    turns = {}
    for command in TURNS:
        with Relay(server.port, delay=0.05) as relay:
            ssh_config(behind(relay, server), server)
            said = tool(*command.split(), "--host", "gpu", "--site-packages", tree, "--json")
        assert said.code == 0, said.stderr
        turns[command] = relay.turns
    assert all(turns[command] <= most for command, most in TURNS.items()), turns


# ---------------------------------------------------------------- 32


def test_case_32_hosts_differ(sshd, tree, tool, ssh_config, tmp_path):
    """A plan for each host, and none is touched unless all are good; `--keep-going` applies to those that are."""
    trees = {"new": make_package(tmp_path / "new", version="0.5.20"), "old": tree}
    ssh_config("", *(sshd(alias=name) for name in trees))
    hosts = tmp_path / "hosts.toml"
    hosts.write_text("".join(f'[hosts.{name}]\nsite_packages = "{at}"\n' for name, at in trees.items()))
    start = {name: hashes(at) for name, at in trees.items()}
    options = ("--host", "old", "--host", "new", "--config", hosts, "--json")

    for dry in ((), ("--dry-run",)):
        said = tool("apply", *options, *dry)
        assert (said.code, said.error["error"]) == (10, "MixedOutcome"), said.stderr
        old, new = said.json["hosts"]
        assert new["error"]["error"] == "UnsupportedVersion" and "0.5.20" in new["error"]["what"]
        assert "0.5.11" in new["error"]["next"]
        assert "not touched" in old["error"]["what"] and "new" in old["error"]["what"]
        assert [action["kind"] for action in old["plan"]["actions"]].count("modify") == 3
        assert {name: hashes(at) for name, at in trees.items()} == start

    said = tool("apply", *options, "--keep-going")
    assert said.code == 10 and [host["ok"] for host in said.json["hosts"]] == [True, False]
    assert hashes(trees["old"]) != start["old"] and hashes(trees["new"]) == start["new"]
    assert tool("revert", "--host", "old", "--config", hosts).code == 0
    assert hashes(trees["old"]) == start["old"]


@pytest.mark.long
def test_case_32_each_host_gets_the_series_of_its_own_version(sshd, tree, tool, ssh_config, tmp_path):
    make_series(tmp_path / "series/sglang-0.5.20", version="0.5.20")
    trees = {"new": make_package(tmp_path / "new", version="0.5.20"), "old": tree}
    ssh_config("", *(sshd(alias=name) for name in trees))
    hosts = tmp_path / "hosts.toml"
    hosts.write_text("".join(f'[hosts.{name}]\nsite_packages = "{at}"\n' for name, at in trees.items()))
    said = tool("apply", "--host", "old", "--host", "new", "--config", hosts, "--json")
    assert said.code == 0, said.stderr
    assert [host["plan"]["series"] for host in said.json["hosts"]] == ["sglang-0.5.11", "sglang-0.5.20"]
