"""What ``ssh`` itself would do to reach a host: ``ssh -G`` is asked, nothing is guessed.

paramiko reads no ssh_config on connecting, and its parser ignores ``Include``
and takes an unknown ``Match`` criterion as matching, so the answer of the
installed OpenSSH client is the only source here. With the environment variable
DDTREE_PATCH_SSH_CONFIG=FILE it is asked as ``ssh -F FILE -G NAME``.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from patcher.errors import HostUnreachable, UsageProblem

SSH_CONFIG_VARIABLE = "DDTREE_PATCH_SSH_CONFIG"
MAX_JUMPS = 8  # a longer chain is a loop in the configuration
DEFAULT_CONNECT_TIMEOUT = 30.0  # seconds, where ssh_config sets none


@dataclass(frozen=True)
class SshTarget:
    """One host to reach over SSH, with every setting resolved.

    jumps: hosts to pass through, in order, each resolved by itself.
    identity_files: private keys to offer (``~`` and ``%`` tokens expanded); they need not exist.
    identity_agent: socket of the key agent, or None for no agent.
    known_hosts: files with accepted host keys; they need not exist.
    keeps_keys_in: the file to which a newly accepted key is added; None where ssh_config keeps none (/dev/null).
    ssh: the words of the ssh command that reaches this host, where it is not reached directly; else empty.
    """

    name: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    known_hosts: tuple[Path, ...] = ()
    keeps_keys_in: Path | None = None
    host_key_alias: str | None = None
    connect_timeout: float = DEFAULT_CONNECT_TIMEOUT
    alive_interval: int = 15
    proxy_command: str | None = None
    jumps: tuple[SshTarget, ...] = ()
    ssh: tuple[str, ...] = ()

    @property
    def known_as(self) -> str:
        """The name under which known_hosts keeps this host's keys, as OpenSSH writes it."""
        if self.host_key_alias:
            return self.host_key_alias
        host = self.hostname.lower()
        return host if self.port == 22 else f"[{host}]:{self.port}"


def resolve(name: str, *, user: str | None = None, port: int | None = None) -> SshTarget:
    """Resolve NAME as ``ssh NAME`` would.

    name: a host name, address or alias of ssh_config. user and port win over ssh_config.
    Raises UsageProblem (a name or a configuration that ssh refuses), HostUnreachable (no ssh client).
    """
    return _resolve(name, user, port, "", depth=0)


def _resolve(name: str, user: str | None, port: int | None, jump: str, depth: int) -> SshTarget:
    if depth > MAX_JUMPS:
        raise UsageProblem(
            "its ProxyJump settings never end", where=name, next_step=f"see what `ssh -G {name}` says of proxyjump"
        )
    settings = _ask_ssh(name, user, port, jump)
    first = {key: values[0] for key, values in settings.items()}
    hostname, login = first["hostname"], first.get("user") or getpass.getuser()
    alias = first.get("hostkeyalias")
    tokens = {
        "%": "%",
        "h": hostname,
        "n": name,
        "p": first["port"],
        "r": login,
        "u": getpass.getuser(),
        "d": str(Path.home()),
        "i": str(os.getuid()),
        "k": alias or hostname,
        "l": socket.gethostname(),
        "L": socket.gethostname().split(".")[0],
    }
    timeout = first.get("connecttimeout", "none")
    command = first.get("proxycommand")
    command = _expand(command, tokens) if command and command != "none" else None
    jumps = _jumps(first.get("proxyjump"), depth)
    own, shared = (_files(first.get(key, ""), tokens) for key in ("userknownhostsfile", "globalknownhostsfile"))
    return SshTarget(
        name=name,
        hostname=hostname,
        port=int(first["port"]),
        user=login,
        identity_files=tuple(
            Path(_expand(path, tokens)) for path in settings.get("identityfile", ()) if path != "none"
        ),
        identities_only=first.get("identitiesonly") == "yes",
        identity_agent=_agent_socket(first.get("identityagent"), tokens),
        known_hosts=(*own, *shared),
        keeps_keys_in=next((path for path in own if path != Path("/dev/null")), None),
        host_key_alias=alias,
        connect_timeout=DEFAULT_CONNECT_TIMEOUT if timeout == "none" else float(timeout),
        alive_interval=int(first.get("serveraliveinterval", "0")) or 15,
        proxy_command=command,
        jumps=jumps,
        ssh=tuple(_ssh(user, port, jump)) if command or jumps or jump else (),
    )


def _files(value: str, tokens: dict[str, str]) -> tuple[Path, ...]:
    """The files of a setting that may name several. `ssh -G` prints a blank between two names like one inside a name,
    so a word that does not begin as a path does is taken for the rest of the name before it."""
    names: list[str] = []
    for word in value.split(" ") if value else ():
        if names and not word.startswith(("/", "~", "%", "${")) and word != "none":
            names[-1] += f" {word}"
        else:
            names.append(word)
    return tuple(Path(_expand(name, tokens)) for name in names if name != "none")


def _jumps(proxy_jump: str | None, depth: int) -> tuple[SshTarget, ...]:
    """The chain of a ProxyJump value: ``[user@]host[:port]`` or ``ssh://`` URIs, first hop first.

    Only the first hop may have jumps of its own; the others are reached through the one before them.
    """
    if not proxy_jump or proxy_jump == "none":
        return ()
    chain: list[SshTarget] = []
    passed: list[str] = []
    for spec in proxy_jump.split(","):
        user, host, port = _split_jump(spec)
        hop = _resolve(host, user, port, ",".join(passed), depth + 1)
        if not passed:
            chain.extend(hop.jumps)
        chain.append(replace(hop, jumps=()))
        passed.append(spec.strip())
    return tuple(chain)


def _split_jump(spec: str) -> tuple[str | None, str, int | None]:
    match = re.fullmatch(
        r"(?:ssh://)?(?:(?P<user>.+)@)?(?P<host>\[[^\]]+\]|[^:@/]+)(?::(?P<port>\d+))?/?", spec.strip()
    )
    if match is None:
        raise UsageProblem(f"cannot read {spec!r} in ProxyJump", next_step="write [user@]host[:port]")
    port = match["port"]
    return match["user"], match["host"].strip("[]"), int(port) if port else None


def _ssh(user: str | None, port: int | None, jump: str) -> list[str]:
    """The ssh command, but for the host: what it is told beside the configuration."""
    argv = ["ssh"]
    config = os.environ.get(SSH_CONFIG_VARIABLE)
    if config:
        argv += ["-F", config]
    if user:
        argv += ["-l", user]
    if port:
        argv += ["-p", str(port)]
    if jump:
        argv += ["-J", jump]
    return argv


def _ask_ssh(name: str, user: str | None, port: int | None, jump: str) -> dict[str, list[str]]:
    """The lines of ``ssh -G`` as key -> values, in the order in which ssh tries them."""
    argv = [*_ssh(user, port, jump), "-T", "-G", "--", name]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except FileNotFoundError:
        raise HostUnreachable(
            "no ssh client is installed here, so ssh_config cannot be read",
            where=name,
            next_step="install the OpenSSH client (openssh-client)",
        ) from None
    except subprocess.TimeoutExpired:
        raise HostUnreachable(
            "`ssh -G` did not answer within 60 s", where=name, next_step="look for a slow `Match exec` in ssh_config"
        ) from None
    settings: dict[str, list[str]] = {}
    for line in done.stdout.decode(errors="surrogateescape").splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key.lower(), []).append(value)
    if done.returncode != 0 or "hostname" not in settings or "port" not in settings:
        said = done.stderr.decode(errors="replace").strip()
        raise UsageProblem(
            "ssh refuses this host name or its configuration",
            where=name,
            detail=said,
            next_step=f"make `ssh -G {name}` work" + (f" (it says: {said.splitlines()[-1]})" if said else ""),
        )
    return settings


def _expand(text: str, tokens: dict[str, str]) -> str:
    """Expand ``~``, ``${VARIABLE}`` and the ``%`` tokens of ssh_config(5); unknown tokens stay."""
    text = os.path.expanduser(text)
    text = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), text)
    return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)


def _agent_socket(setting: str | None, tokens: dict[str, str]) -> str | None:
    if setting == "none":
        return None
    if setting is None or setting == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if setting.startswith("$") and not setting.startswith("${"):
        return os.environ.get(setting[1:]) or None
    return _expand(setting, tokens)
