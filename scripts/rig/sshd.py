"""A real sshd on a loopback port, with keys and settings of its own in one directory."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.rig.problem import RigProblem
from scripts.rig.processes import end_group

# What a server over this sshd may look like at most: nothing of the machine's own ssh settings is read or written.
SERVER_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {home}/host_key
PidFile {home}/sshd.pid
AuthorizedKeysFile {home}/client_key.pub
AuthenticationMethods publickey
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
Subsystem sftp internal-sftp
{extra}
"""

CLIENT_CONFIG = """\
Host {alias}
  HostName {address}
  Port {port}
  User {user}
  IdentityFile {home}/client_key
  IdentitiesOnly yes
  UserKnownHostsFile {home}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


class Sshd:
    """One running sshd. `ssh -F ssh_config ALIAS` gets in; `known_hosts` knows its key.

    Attributes: alias, address, port, user; and paths in `home`: ssh_config, known_hosts, host_key, client_key, log.
    """

    def __init__(
        self,
        home: Path,
        *,
        alias: str = "demo",
        address: str = "127.0.0.1",
        user: str | None = None,
        extra: str = "",
        around: Sequence[str] = (),
    ):
        """Makes keys and settings in the new directory `home` and starts. `extra`: more lines of sshd_config.

        around: a command in front of sshd's own, which it ends by becoming it (exec).

        Raises: RigProblem if OpenSSH is missing or sshd does not come up.
        """
        self.home, self.alias, self.address = home, alias, address
        self.user = user or getpass.getuser()
        self.port = free_port(address)
        self.extra = extra
        self.around = tuple(around)
        self.ssh_config = home / "ssh_config"
        self.known_hosts = home / "known_hosts"
        self.host_key = home / "host_key"
        self.client_key = home / "client_key"
        self.log = home / "sshd.log"
        self._process: subprocess.Popen | None = None
        self._write_files()
        self.start()

    def _write_files(self) -> None:
        self.home.mkdir(parents=True)
        for key in (self.host_key, self.client_key):
            subprocess.run(
                [_program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "ddtree-patch rig", "-f", str(key)],
                check=True,
            )
        kind, blob = self.host_key.with_suffix(".pub").read_text().split()[:2]
        self.known_hosts.write_text(f"[{self.address}]:{self.port} {kind} {blob}\n")
        self.ssh_config.write_text(CLIENT_CONFIG.format_map(vars(self)))
        (self.home / "sshd_config").write_text(SERVER_CONFIG.format_map(vars(self)))

    def start(self) -> None:
        """Start (again) on the same port with the same keys. Raises RigProblem."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # a root sshd wants its privilege separation directory
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*self.around, _program("sshd"), "-D", "-e", "-f", str(self.home / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.home,
                start_new_session=True,
            )
        deadline = time.monotonic() + 30
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RigProblem(f"sshd did not come up:\n{self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.address, self.port), timeout=2) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def stop(self) -> None:
        """End the listener and the connections it still serves; what was started detached over them stays."""
        if self._process is None:
            return
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        connections = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        end_group(self._process.pid)
        self._process.wait()
        self._process = None
        for pid in connections:  # sshd makes each connection's process the leader of a group
            end_group(pid)


def _program(name: str) -> str:
    """Full path (sshd insists on it). Raises RigProblem."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise RigProblem(f"{name} is not installed: apt-get install openssh-server openssh-client")
    return path
