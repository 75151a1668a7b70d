"""A real systemd on a machine where PID 1 is another one: in namespaces, with units of ours only, reached over ssh.

It has this machine's file system, network and users; what it writes to /etc, /run and /var/log is gone with it.
"""

import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from scripts.rig.problem import RigProblem
from scripts.rig.sshd import Sshd

BOOT = Path(__file__).with_name("systemd_machine.sh")
USER, UID = "rigops", 51_617
# None of them may pull in a default dependency: those lead to the targets of a whole machine.
UNITS = {
    "rig.target": """
[Unit]
DefaultDependencies=no
Wants=systemd-journald.service rig-sshd.service
""",
    "rig-sshd.service": """
[Unit]
DefaultDependencies=no
[Service]
ExecStart={sshd} -D -e -f {home}/sshd/sshd_config
KillMode=process
""",
    # What `loginctl enable-linger` brings about on a machine with logind: the user's own systemd, without a login.
    f"user@{UID}.service": """
[Unit]
DefaultDependencies=no
[Service]
Type=notify
User={user}
Environment=XDG_RUNTIME_DIR=/run/user/{uid} HOME={home}/user
ExecStartPre=+/usr/bin/install -d -o {user} -m 700 /run/user/{uid}
ExecStart=/lib/systemd/systemd --user --unit=rig.target
Delegate=yes
KillMode=mixed
Slice=user-{uid}.slice
""",
}
USER_TARGET = "[Unit]\nDefaultDependencies=no\n"


class UnitSshd(Sshd):
    """An sshd that a unit starts."""

    def start(self) -> None:
        """Nothing yet: systemd does it."""

    def wait(self, alive: subprocess.Popen) -> bool:
        """Until it answers; False once `alive` has ended."""
        while not self._answers():
            if alive.poll() is not None:
                return False
            time.sleep(0.05)
        return True

    def stop(self) -> None:
        """systemd does that too."""


class SystemdMachine:
    """A booted systemd with an sshd and, with `user`, the manager of an ordinary user, whose home is `home`/user.

    Attributes: home; user and uid of that account; sshd (of root, or of the user: see `ssh_config`).
    """

    user, uid = USER, UID

    def __init__(
        self,
        home: Path,
        *,
        login: str,
        units: Mapping[str, str],
        user_units: Mapping[str, str],
        files: Mapping[str, str],
    ):
        """`home`: a new directory that every account can reach. `login`: who ssh logs in as, root or USER.

        units, user_units: file name -> text. files: absolute path -> text, written when booted (the overlaid /etc).
        Raises RigProblem when namespaces are not allowed here, or a program is missing.
        """
        self.home = home
        self._process: subprocess.Popen | None = None
        self._cgroup = f"ddtree-rig-{os.getpid()}-{time.time_ns() % 10**9}"
        (home / "units").mkdir(parents=True)
        (home / "user/.config/systemd/user").mkdir(parents=True)
        self.sshd = UnitSshd(home / "sshd", user=login)
        names = {"home": home, "user": USER, "uid": UID, "sshd": shutil.which("sshd", path="/usr/sbin:/sbin")}
        for name, text in {**UNITS, **units}.items():
            (home / "units" / name).write_text(text.format_map(names) if name in UNITS else text)
        for name, text in {"rig.target": USER_TARGET, **user_units}.items():
            (home / "user/.config/systemd/user" / name).write_text(text)
        for path in [home / "user", *(home / "user").rglob("*")]:
            os.chown(path, UID, UID)
        self.files = files

    def boot(self) -> "SystemdMachine":
        """Start it; returns when its sshd answers."""
        argv = ["unshare", "--mount", "sh", str(BOOT), str(self.home), self._cgroup, USER, str(UID)]
        with open(self.home / "boot.log", "wb") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
            )
        if not self.sshd.wait(self._process):
            raise RigProblem(f"no systemd in namespaces: {(self.home / 'boot.log').read_text(errors='replace')}")
        self.run("systemctl", "start", f"user@{UID}.service")
        for path, text in self.files.items():
            self.run("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat >"$1"', "sh", path, input=text)
        return self

    def run(self, *argv: str, input: str = "", check: bool = True) -> str:
        """Standard output of a program run by root in the machine, not over ssh."""
        inside = ["nsenter", f"--target={self._init()}", "--mount", "--pid", "--cgroup", "--ipc", "--uts", "--"]
        done = subprocess.run([*inside, *argv], input=input, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise RigProblem(f"{' '.join(argv)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def _init(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return int(children.split()[0])

    def stop(self) -> None:
        """End it with all that runs in it, and remove its control group."""
        if self._process is None:
            return
        self._process.kill()  # TERM is ignored by `unshare --fork`; its end is the end of the namespaces' first process
        self._process.wait()
        self._process = None
        mount = self.home / "cgroup"
        script = (
            'mount -t cgroup2 cgroup2 "$1" && cd "$1/$2" && '
            "while ! find . -depth -mindepth 1 -type d -exec rmdir {} + 2>/dev/null; do sleep 0.1; done; "
            'cd .. && rmdir "$2"'
        )
        subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", str(mount), self._cgroup], check=True, timeout=30
        )


@functools.cache
def why_not() -> str:
    """Why no such machine can be had here; empty when it can."""
    if os.geteuid() != 0:
        return "only root may make the namespaces"
    for program in ("/lib/systemd/systemd", "unshare", "nsenter", "useradd"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            return f"{program} is not installed"
    script = 'mount --make-rprivate / && mount -t cgroup2 cgroup2 "$1" && mkdir "$1/$2" && rmdir "$1/$2"'
    with tempfile.TemporaryDirectory() as directory:
        argv = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "sh",
            "-c",
            script,
            "sh",
            directory,
            f"ddtree-rig-probe-{os.getpid()}",
        ]
        probe = subprocess.run(argv, capture_output=True, text=True, check=False)
    return f"no namespaces or control groups here: {probe.stderr.strip()}" if probe.returncode else ""
