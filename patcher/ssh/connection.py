"""Run a program on a host, or reach one of its ports: here, or over SSH.

Both ways look the same to the rest: ``run`` takes an argv (no shell features),
feeds standard input, drains both output streams at once and gives bytes back.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import paramiko

from patcher.errors import AuthenticationProblem, BadAnswer, HostUnreachable
from patcher.ssh import auth, config, host_keys
from patcher.ssh.channel_socket import ChannelSocket
from patcher.ssh.config import SshTarget
from patcher.ssh.streams import LIMIT, Streams

if TYPE_CHECKING:
    from patcher.hosts import HostSettings

# paramiko logs a trace for every host that does not answer; all that it has to say comes back as our own errors.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

CHUNK = 1 << 16
DEAD_LINK_MS = 60_000  # how long sent bytes may stay unacknowledged
SUDO = ("sudo", "-n", "--")
# Start-up files of the login may have written lines before these.
REFUSED_BY_SUDO = re.compile(rb"^(?:sudo: .*|Sorry, user .*|.* is not in the sudoers file.*)$", re.MULTILINE)
NO_SUDO = re.compile(rb"\bsudo: (?:command not found|not found|\[Errno 2\])")


@dataclass(frozen=True)
class Completed:
    """What a program left behind. rc is negative when a signal ended it."""

    rc: int
    stdout: bytes
    stderr: bytes


class Connection(ABC):
    """A way to one host. round_trips counts the programs started so far."""

    def __init__(self, name: str, *, sudo: bool = False) -> None:
        self.name = name
        self.sudo = sudo
        self.round_trips = 0

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        timeout: float | None = 600,
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """Run ARGV to its end.

        input: bytes for its standard input. timeout: seconds for the whole run, None for no limit.
        on_stderr: called with each piece of standard error as it comes.
        Raises HostUnreachable (connection lost, or no end within timeout), AuthenticationProblem (sudo refuses).
        """
        self.round_trips += 1
        done = self._run([*SUDO, *argv] if self.sudo else list(argv), input, timeout, on_stderr or (lambda piece: None))
        return self._after_sudo(argv[0], done) if self.sudo else done

    def _after_sudo(self, program: str, done: Completed) -> Completed:
        """DONE, where the program ran. Raises AuthenticationProblem where sudo did not start it, or is not there."""
        if done.rc == 127 and NO_SUDO.search(done.stderr):
            raise AuthenticationProblem(
                "there is no sudo on the host",
                where=self.name,
                next_step="install sudo there, or connect as an account that needs none: sudo = false",
                detail=done.stderr.decode(errors="replace").strip(),
            )
        refusal = REFUSED_BY_SUDO.search(done.stderr) if done.rc == 1 else None
        if refusal is None:
            return done
        if refusal[0].endswith(b": command not found"):
            return Completed(127, done.stdout, done.stderr)  # as it is without sudo
        # What sudoers has to say is the account's name and the full path; and what it says now is good to know.
        ask = 'printf "<<%s:%s>>" "$(id -un)" "$(command -v "$1")"; sudo -n -l'
        asked = self._run(["sh", "-c", ask, "sh", program], b"", 60, lambda piece: None)
        said = re.search(r"<<(.*):(.*)>>((?s:.*))", asked.stdout.decode(errors="replace"))
        account, path, allowed = said.groups() if said else ("USER", "", "")
        raise AuthenticationProblem(
            f"sudo does not run {program} without a password",
            where=self.name,
            next_step=f"allow it in sudoers: {account} ALL=(root) NOPASSWD: {path or program} - or give the --venv "
            "whose interpreter it allows, or set sudo = false",
            detail=f"{done.stderr.decode(errors='replace').strip()}\n{allowed.strip()}".strip(),
        )

    @abstractmethod
    def _run(
        self, argv: list[str], input: bytes, timeout: float | None, on_stderr: Callable[[bytes], None]
    ) -> Completed: ...

    @abstractmethod
    def open_socket(self, host: str, port: int, timeout: float | None = 30) -> Any:
        """A connected socket to HOST:PORT as the host itself sees it, usable by http.client.

        Raises OSError when nothing listens there, HostUnreachable when the way there is closed.
        """

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(host: HostSettings) -> Connection:
    """Open the connection that HOST's settings describe. Raises HostUnreachable and its kinds, UsageProblem."""
    if host.local:
        return LocalConnection(host.name, sudo=host.sudo)
    target = config.resolve(host.address or host.name, user=host.user or None, port=host.port)
    return SshConnection(target, name=host.name, sudo=host.sudo)


class LocalConnection(Connection):
    """This machine."""

    def __init__(self, name: str = "local", *, sudo: bool = False) -> None:
        super().__init__(name, sudo=sudo)

    def _run(
        self, argv: list[str], input: bytes, timeout: float | None, on_stderr: Callable[[bytes], None]
    ) -> Completed:
        try:
            # In a session of its own: Ctrl-C is for this program, which lets a commit end; as over SSH.
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            # what a shell would answer, so that both kinds of connection behave alike
            return Completed(126 if isinstance(error, PermissionError) else 127, b"", f"{argv[0]}: {error}".encode())
        stdin = cast(io.BufferedWriter, process.stdin)
        stdout, stderr = cast(io.BufferedReader, process.stdout), cast(io.BufferedReader, process.stderr)
        streams = Streams(
            stdin.write,
            stdin.close,
            lambda: stdout.read1(CHUNK),
            lambda: stderr.read1(CHUNK),
            on_stderr,
            lambda: os.killpg(process.pid, signal.SIGKILL),
        )
        streams.start(input)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise _too_slow(self.name, argv, timeout) from None
        finally:
            if streams.finish():
                stdout.close()
                stderr.close()
        if streams.too_much:
            raise _too_much(self.name, argv)
        return Completed(process.returncode, streams.stdout, streams.stderr)

    def open_socket(self, host: str, port: int, timeout: float | None = 30) -> socket.socket:
        return socket.create_connection((host, port), timeout)

    def close(self) -> None:
        pass


class SshConnection(Connection):
    """A host reached by paramiko, through its jumps. Connects on construction."""

    def __init__(self, target: SshTarget, *, name: str = "", sudo: bool = False) -> None:
        super().__init__(name or target.name, sudo=sudo)
        self.target = target
        self._transports: list[paramiko.Transport] = []
        self._proxy: subprocess.Popen[bytes] | None = None
        try:
            for hop in (*target.jumps, target):
                self._transports.append(self._open(hop))
        except BaseException:
            self.close()
            raise

    def _open(self, hop: SshTarget) -> paramiko.Transport:
        link = self._link(hop)
        known = host_keys.known_keys(hop)
        began = time.monotonic()
        try:
            transport = paramiko.Transport(link)
            options = transport.get_security_options()
            options.key_types = host_keys.algorithms(known, tuple(options.key_types))
            transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = hop.connect_timeout
            transport.start_client(timeout=hop.connect_timeout)
            key = transport.get_remote_server_key()  # raises when start_client gave up waiting, which it does silently
        except (paramiko.SSHException, EOFError, OSError) as error:
            link.close()
            if _is_long_ago(began, hop):
                awaited = "the key exchange" if transport.remote_version else "the first line of its SSH server"
                raise auth.no_answer(hop, awaited) from error
            raise HostUnreachable(
                f"no SSH server answers: {str(error) or type(error).__name__}",
                where=hop.name,
                next_step=f"make `ssh {hop.name} true` work",
            ) from error
        try:
            host_keys.check(hop, key.get_name(), key.asbytes(), known)
            auth.authenticate(transport, hop)
            transport.set_keepalive(hop.alive_interval)
        except BaseException:
            transport.close()
            raise
        return transport

    def _link(self, hop: SshTarget) -> Any:
        """The byte stream to HOP: through the last jump, through its ProxyCommand, or straight."""
        where = f"{hop.hostname}:{hop.port}"
        try:
            if self._transports:
                return self._transports[-1].open_channel(
                    "direct-tcpip", (hop.hostname, hop.port), ("127.0.0.1", 0), timeout=hop.connect_timeout
                )
            if hop.proxy_command:
                ours, theirs = socket.socketpair()
                with theirs:
                    # Ctrl-C is for this program, which lets a commit end: the way to the host must last until then.
                    self._proxy = subprocess.Popen(
                        ["/bin/sh", "-c", f"trap '' INT; exec {hop.proxy_command}"],
                        stdin=theirs.fileno(),
                        stdout=theirs.fileno(),
                    )
                return ours
            link = socket.create_connection((hop.hostname, hop.port), hop.connect_timeout)
        except socket.gaierror as error:
            raise HostUnreachable(
                f"{hop.hostname} has no address: {error.strerror}",
                where=hop.name,
                next_step="check the host name, or give it an entry in hosts.toml or ssh_config",
            ) from error
        except UnicodeError as error:
            raise HostUnreachable(
                f"{hop.hostname!r} cannot be a host's name", where=hop.name, next_step="check the host name"
            ) from error
        except (OSError, paramiko.SSHException) as error:
            raise HostUnreachable(
                f"no connection to {where}: {error}",
                where=hop.name,
                next_step="check address, port, firewall, and that sshd runs there",
            ) from error
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_LINK_MS)
        return link

    def _run(
        self, argv: list[str], input: bytes, timeout: float | None, on_stderr: Callable[[bytes], None]
    ) -> Completed:
        command = shlex.join(argv)
        try:
            with self._transports[-1].open_session(timeout=self.target.connect_timeout) as channel:
                self._start(channel, command)
                streams = Streams(
                    channel.sendall,
                    channel.shutdown_write,
                    lambda: channel.recv(CHUNK),
                    lambda: channel.recv_stderr(CHUNK),
                    on_stderr,
                    channel.close,
                )
                streams.start(input)
                if not channel.status_event.wait(timeout):
                    raise _too_slow(self.name, argv, timeout)
                streams.finish()
                rc = channel.recv_exit_status()
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self._lost(error) from error
        if streams.too_much:
            raise _too_much(self.name, argv)
        if rc == -1 and not self._transports[-1].is_active():
            raise self._lost(None)
        return Completed(rc, streams.stdout, streams.stderr)

    def _start(self, channel: paramiko.Channel, command: str) -> None:
        """exec_command, which by itself waits for the host's yes without end."""

        def give_up() -> None:
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):  # nobody needs to hear of the end
                channel.close()

        began, patience = time.monotonic(), threading.Timer(self.target.connect_timeout, give_up)
        patience.daemon = True
        patience.start()
        try:
            channel.exec_command(command)
        except paramiko.SSHException as error:
            if _is_long_ago(began, self.target):
                raise auth.no_answer(self.target, "a program to start") from error
            raise
        finally:
            patience.cancel()

    def _lost(self, error: Exception | None) -> HostUnreachable:
        if str(error) == "Timeout opening channel.":  # paramiko has no type of its own for it
            return auth.no_answer(self.target, "a channel, after the login")
        return HostUnreachable(
            "the connection was lost",
            where=self.name,
            detail=str(error or ""),
            next_step="run the command again: it says where the host stands, and finishes or undoes",
        )

    def open_socket(self, host: str, port: int, timeout: float | None = 30) -> ChannelSocket:
        try:
            channel = self._transports[-1].open_channel("direct-tcpip", (host, port), ("127.0.0.1", 0), timeout=timeout)
        except paramiko.ChannelException as refusal:
            if refusal.code == 1:  # administratively prohibited
                raise HostUnreachable(
                    "the SSH server forbids forwarding, so the service's port cannot be reached",
                    where=self.name,
                    next_step="set AllowTcpForwarding yes (or local) in its sshd_config",
                ) from refusal
            raise ConnectionRefusedError(f"{host}:{port} on {self.name}: {refusal.text}") from refusal
        except (paramiko.SSHException, EOFError) as error:
            raise self._lost(error) from error
        channel.settimeout(timeout)
        return ChannelSocket(channel)

    def close(self) -> None:
        for transport in reversed(self._transports):
            transport.close()
        if self._proxy is not None:
            self._proxy.terminate()
            self._proxy.wait()


def _is_long_ago(began: float, hop: SshTarget) -> bool:
    """Whether what failed now had been waited for as long as anything is; paramiko's exceptions do not say."""
    return time.monotonic() - began > hop.connect_timeout - 0.1


def _too_much(name: str, argv: list[str]) -> BadAnswer:
    return BadAnswer(
        f"{argv[0]} printed more than {LIMIT >> 20} MiB and was ended",
        where=name,
        next_step="look at what it is on that host; it is none that this tool knows",
    )


def _too_slow(name: str, argv: list[str], timeout: float | None) -> HostUnreachable:
    return HostUnreachable(
        f"{argv[0]} did not end within {timeout:g} s",
        where=name,
        next_step="run the command again: it says where the host stands, and finishes or undoes",
    )
