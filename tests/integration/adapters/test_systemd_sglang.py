"""The real SGLang as a unit of a real systemd: patched, made to draft trees by a drop-in, and back."""

import hashlib
import json
import shlex
import shutil
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
from served import documented, put_in

from scripts.rig import server, target
from scripts.rig.systemd import SystemdMachine, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"no systemd can be run here: {why_not()}"),
    pytest.mark.server,
    pytest.mark.long,
    pytest.mark.timeout(3600),
]
SECTION = "systemd, a unit of the system"
LAUNCH = "/opt/sglang/venv/bin/python -m sglang.launch_server --port 30000"
SETTINGS = """
[hosts.gpu1.smoke]
suite = "tiny"
[hosts.gpu1.ready]
deadline = 900
[hosts.gpu1.kernels]
require = false
"""
DROP_IN = "/etc/systemd/system/sglang.service.d/ddtree.conf"


@pytest.fixture
def home():
    # Of a short path: SGLang's sockets lie in it, whose names may have 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="ddtree-rig-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def hashes(root):
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def algorithm(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=60) as answer:
        return json.load(answer)["speculative_algorithm"]


def test_apply_then_the_flags_then_back(home, tool, monkeypatch):
    venv = target.copy_target(home / "venv")
    before = hashes(target.site_packages(venv))
    port = server.free_port_for_sglang()
    command = server.command_line(venv, port, "DFLASH")
    (home / "sockets").mkdir()
    environment = {**server.ENVIRONMENT, "TMPDIR": home / "sockets", "HOME": "/root"}
    lines = "\n".join(f"Environment={name}={value}" for name, value in environment.items())
    unit = put_in(
        documented(SECTION, "ini"),
        {
            LAUNCH
            + """ --model-path /models/target \\
    --speculative-algorithm DFLASH --speculative-draft-model-path /models/draft""": shlex.join(command),
            "/opt/sglang": home,
            "User=sglang": lines,
        },
    )
    config = home / "hosts.toml"
    config.write_text(
        put_in(
            documented(SECTION, "toml"),
            {"10.1.2.200": "demo", "/opt/sglang/venv": venv, "port = 30000": f"port = {port}", "sudo = true\n": ""},
        )
        + SETTINGS
    )
    machine = SystemdMachine(
        home / "machine",
        login="root",
        user_units={},
        files={},
        units={"sglang.service": f"[Unit]\nDefaultDependencies=no\n{unit}"},
    )
    monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(machine.sshd.ssh_config))
    monkeypatch.chdir(home)

    def run(name):
        said = tool(name, "--host", "gpu1", "--config", config, "--json")
        assert said.code == 0, said.stdout + said.stderr
        return said.host

    try:
        machine.boot()
        machine.run("systemctl", "start", "sglang.service")
        deadline = time.monotonic() + 900
        while True:
            try:
                assert algorithm(port) == "DFLASH"
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(1)

        applied = run("apply")
        assert algorithm(port) == "DFLASH" and any("drafting trees" in line for line in applied["not_done"])

        drop_in = put_in(
            documented(SECTION, "ini", 1),
            {
                LAUNCH + " --model-path /models/target": shlex.join(server.command_line(venv, port, "DDTREE")),
                "/models/draft": server.MODELS / "draft",
            },
        )
        machine.run("sh", "-c", 'mkdir "$(dirname "$1")" && cat >"$1"', "sh", DROP_IN, input=drop_in)
        machine.run("systemctl", "daemon-reload")
        restarted = run("restart")
        assert algorithm(port) == "DDTREE" and restarted["ready"]["pid"] != applied["ready"]["pid"]
        checks = {check["name"]: check for check in run("smoke-test")["checks"]}
        assert checks["patch_identity"]["passed"] and checks["diverse"]["passed"]
        run("verify")

        machine.run("rm", DROP_IN)
        machine.run("systemctl", "daemon-reload")
        run("revert")
        assert algorithm(port) == "DFLASH"
        assert hashes(target.site_packages(venv)) == before
    finally:
        machine.stop()
