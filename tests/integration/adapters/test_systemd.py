"""Units of a real systemd, of the system and of a user, reached over ssh like any host."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from served import Served, documented, put_in, ssh

from scripts.rig.systemd import UID, USER, SystemdMachine, why_not
from tests.support.stub_host import StubHost

WHY_NOT = why_not() or ("" if shutil.which("sudo") else "sudo is not installed")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"no units can be run here: {WHY_NOT}")

SYSTEM, OF_USER = "systemd, a unit of the system", "systemd, a unit of a user"
MINIMAL = "[Unit]\nDefaultDependencies=no\n"  # the defaults lead to targets of a whole machine
# A system bus without polkit, and without activation of anything: what an account without rights is refused through.
BUS = {
    "dbus.socket": f"{MINIMAL}[Socket]\nListenStream=/run/dbus/system_bus_socket\n",
    "dbus.service": f"{MINIMAL}[Service]\nExecStart=/usr/bin/dbus-daemon --config-file=/etc/rig-bus.conf "
    "--address=systemd: --nofork --nopidfile --syslog-only\n",
}
BUS_CONFIG = {
    "/etc/rig-bus.conf": """<busconfig><type>system</type><user>messagebus</user><auth>EXTERNAL</auth>
<listen>unix:path=/run/dbus/system_bus_socket</listen>
<policy context="default"><allow user="*"/><allow send_type="method_return"/><allow send_type="error"/>
<allow receive_type="method_call"/><allow receive_type="method_return"/><allow receive_type="error"/>
<allow receive_type="signal"/><allow send_destination="org.freedesktop.DBus"/></policy>
<includedir>/usr/share/dbus-1/system.d</includedir></busconfig>
"""
}
SUDOERS = {"/etc/sudoers.d/rig": f"{USER} ALL=(root) NOPASSWD: ALL\n"}


@pytest.fixture
def machine(tool, monkeypatch):
    """Factory: `machine(section, unit=more of the server's unit, units=more units, files=...)` -> (Served, machine)."""
    # Below /tmp itself: another account than root's cannot reach what pytest makes for root.
    home = Path(tempfile.mkdtemp(prefix="ddtree-rig-"))
    home.chmod(0o755)
    started = []

    def boot(section, *, unit="", units=None, files=SUDOERS):
        stub = StubHost(home / "target", python="/usr/bin/python3")
        (home / "target").chmod(0o755)
        text = put_in(
            documented(SYSTEM, "ini"),
            {"/opt/sglang/venv": stub.venv, "/opt/sglang": home / "target", "30000": stub.port, "User=sglang": ""},
        )
        text = MINIMAL + text + unit
        of_user = section == OF_USER
        own = {} if of_user else {"sglang.service": text.replace("[Service]\n", f"[Service]\nUser={USER}\n")}
        rig = SystemdMachine(
            home / "machine",
            login=USER,
            units={**own, **(units or {})},
            files=files,
            user_units={"sglang.service": text} if of_user else {},
        )
        started.extend([rig, stub])
        subprocess.run(["chown", "-R", f"{UID}:{UID}", home / "target"], check=True)
        rig.boot()
        as_user = [
            "setpriv",
            f"--reuid={UID}",
            f"--regid={UID}",
            "--clear-groups",
            "env",
            f"XDG_RUNTIME_DIR=/run/user/{UID}",
            "systemctl",
            "--user",
        ]
        rig.run(*(as_user if of_user else ["systemctl"]), "start", "sglang.service")
        stub.wait_answer()
        monkeypatch.setenv("DDTREE_PATCH_SERIES_ROOT", str(stub.series_root))
        monkeypatch.setenv("DDTREE_PATCH_SSH_CONFIG", str(rig.sshd.ssh_config))
        monkeypatch.chdir(home)
        return Served(stub, tool, section, {}, ssh(rig.sshd.ssh_config)), rig

    yield boot
    for what in started:
        what.stop()
    shutil.rmtree(home)


@pytest.mark.parametrize("section", [SYSTEM, OF_USER])
def test_there_and_back(machine, section):
    served, _ = machine(section)
    served.there_and_back()
    owners = {path.stat().st_uid for path in served.stub.site_packages.rglob("*.py")}
    assert owners == {UID}, "through sudo, too, files stay their owner's"


@pytest.mark.parametrize("section", [SYSTEM, pytest.param(OF_USER, marks=pytest.mark.long)])
def test_the_kind_process_is_refused(machine, section):
    machine(section)[0].refused_as_a_process("is kept running by sglang.service, ")


@pytest.mark.parametrize("section", [pytest.param(SYSTEM, marks=pytest.mark.long), OF_USER])
def test_a_server_that_does_not_come_up_is_rolled_back(machine, section):
    served, _ = machine(section)
    said = served.failed_readiness()
    assert "no kernel image is available" in said.error["detail"], "the journal says why"


@pytest.mark.long
@pytest.mark.parametrize("section", [SYSTEM, OF_USER])
def test_a_server_that_fails_the_smoke_suite_is_rolled_back(machine, section):
    machine(section)[0].failed_smoke()


@pytest.mark.parametrize("section", [SYSTEM, pytest.param(OF_USER, marks=pytest.mark.long)])
def test_a_rollback_that_fails_is_finished_by_hand(machine, section):
    machine(section)[0].failed_rollback()


@pytest.mark.long
def test_a_unit_that_reached_its_start_limit_is_started_all_the_same(machine):
    """Two starts an hour: the operator's, and the one that fails. The old server's is the third."""
    served, rig = machine(SYSTEM, unit="Restart=no\n[Unit]\nStartLimitBurst=2\nStartLimitIntervalSec=3600\n")
    served.failed_readiness()
    assert "active" in rig.run("systemctl", "is-active", "sglang.service")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("dbus-daemon") is None, reason="dbus-daemon is not installed")
def test_an_account_that_may_not_restart_the_unit_leaves_the_server_alone(machine):
    served, rig = machine(SYSTEM, units=BUS, files=BUS_CONFIG)
    rig.run("systemctl", "start", "dbus.socket", "dbus.service")
    config = served.stub.config
    config.write_text(config.read_text().replace("sudo = true\n", ""))
    pid = rig.run("systemctl", "show", "--value", "--property=MainPID", "sglang.service")
    said = served.run("apply", code=6)
    steps = {step["name"]: step for step in said.host["steps"]}
    assert "was never ended" in steps["bring back the old server"]["detail"]
    assert served.stub.hashes() == served.before and served.serves(None)
    assert rig.run("systemctl", "show", "--value", "--property=MainPID", "sglang.service") == pid
