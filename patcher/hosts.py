"""Hosts: their settings, and which of them a command means.

Every setting has a default, so a host needs no entry in hosts.toml: an address that is not in the file is a host by
itself, and `ssh -G` says how to reach it.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, field
from msgspec.structs import replace

from patcher.errors import UsageProblem
from patcher.typed import Settings

LOCAL_NAME = "local"

Port = Annotated[int, Meta(ge=1, le=65535)]
Command = Annotated[tuple[str, ...], Meta(min_length=1)]  # one string a word: no shell takes it apart


class ServiceSettings(Settings, frozen=True):
    """How the server is stopped and started.

    `args` are flags set on the server's own command line while the patch is in place (adapter `process`): a string is
    the flag's value, True is a flag without value, False takes the flag off. `restart`, `stop` and `start` are argv
    lists of the adapter `command`. `control` is the argv of the program that steers the supervisor or container, where
    it is not plain `supervisorctl` or `docker` (["/opt/sup/bin/supervisorctl", "-c", FILE], ["podman"]). `log` is the
    file the server writes to, where it cannot be found out.
    """

    kind: Literal["process", "systemd", "supervisor", "docker", "command", "none"] = "process"
    unit: str = ""
    scope: Literal["system", "user"] = "system"
    program: str = ""
    container: str = ""
    control: Command = ()
    restart: Command = ()
    stop: Command = ()
    start: Command = ()
    log: str = ""
    args: dict[str, str | bool] = field(default_factory=dict)


class EndpointSettings(Settings, frozen=True):
    """Where the server answers, as seen from its own host. `port` None: as on the serving process's command line."""

    host: str = "127.0.0.1"
    port: Port | None = None
    api_key_env: str = ""

    def api_key(self) -> str | None:
        """The key from the environment variable that `api_key_env` names; None when none is named.

        Raises UsageProblem when the variable is named but not set: an unauthenticated call would only fail later.
        """
        if not self.api_key_env:
            return None
        key = os.environ.get(self.api_key_env, "")
        if not key:
            raise UsageProblem(
                f"the environment variable {self.api_key_env} is empty or not set",
                where="endpoint.api_key_env",
                next_step=f"export {self.api_key_env} with the server's API key, or remove api_key_env",
            )
        return key


class ReadySettings(Settings, frozen=True):
    """`deadline`: seconds from the start of the server until it must have answered."""

    deadline: Annotated[float, Meta(gt=0, le=10**9)] = 1800.0


class SmokeSettings(Settings, frozen=True):
    """`suite`: the path of a suite file, or the name of one in configs/; empty: the default suite."""

    suite: str = ""


class KernelSettings(Settings, frozen=True):
    """`require` False turns a missing kernel into a warning."""

    require: bool = True


class HostSettings(Settings, frozen=True):
    """One host. `address` is what ssh is asked for (a name from ssh_config, or an address).

    Hosts that name the same `server` are the nodes of one multi-node SGLang server. `head` is not in the file: it is
    the host of the server's node rank 0, the first one of the file, which answers requests; the host itself otherwise.
    Nor is `config`: the hosts file, where one was named on the command line.
    """

    name: str
    address: str = ""
    user: str = ""
    port: Port | None = None
    local: bool = False
    venv: str = ""
    site_packages: str = ""
    sudo: bool = False
    group: str = ""
    server: str = ""
    head: str = ""
    config: Path | None = None
    service: ServiceSettings = ServiceSettings()
    endpoint: EndpointSettings = EndpointSettings()
    ready: ReadySettings = ReadySettings()
    smoke: SmokeSettings = SmokeSettings()
    kernels: KernelSettings = KernelSettings()

    @property
    def answers(self) -> bool:
        """Whether requests are answered here: by every server of one host, and by the head of a multi-node server."""
        return self.head in ("", self.name)


@dataclass(frozen=True)
class Config:
    """The hosts of one file. `source` is None when there was no file to read."""

    hosts: Mapping[str, HostSettings]
    defaults: HostSettings
    source: Path | None

    def select(self, names: Iterable[str]) -> tuple[HostSettings, ...]:
        """The hosts that `names` mean: a host of the file by its name or address, a group, a multi-node server with all
        its nodes, or else an address as it is.

        Raises UsageProblem for an address that several hosts of the file have: they may be different installations.
        """
        chosen: dict[str, HostSettings] = {}
        for name in names:
            if not name or name.startswith("-"):
                raise UsageProblem(
                    f"{name!r} is not a host name", where="--host", next_step="an address or a name from hosts.toml"
                )
            members = [host for host in self.hosts.values() if host.group == name]
            if name in self.hosts:
                members = [self.hosts[name]]
            elif not members:
                members = [host for host in self.hosts.values() if host.server == name]
            if not members:
                members = [host for host in self.hosts.values() if host.address == name]
                if len(members) > 1:
                    raise UsageProblem(
                        f"{name} is the address of several hosts: {', '.join(host.name for host in members)}",
                        where=str(self.source),
                        next_step="give the name of the one that is meant",
                    )
            for host in members or [replace(self.defaults, name=name, address=name)]:
                chosen[host.name] = host
        return tuple(chosen.values())

    def whole(self, hosts: Iterable[HostSettings]) -> None:
        """Raise UsageProblem when some nodes of a multi-node server are among `hosts`, and others are not."""
        chosen = {host.name for host in hosts}
        for host in self.hosts.values():
            present = sorted(h.name for h in self.hosts.values() if h.server == host.server and h.name in chosen)
            if host.server and present and host.name not in chosen:
                raise UsageProblem(
                    f"{host.name} is a node of server {host.server}, as {', '.join(present)}, and was not chosen",
                    where=str(self.source),
                    next_step="choose all nodes of a server: they can only be changed together",
                )

    def limit(self, hosts: Sequence[HostSettings], patterns: Sequence[str]) -> tuple[HostSettings, ...]:
        """Those of `hosts` whose name, group or server fits a pattern (`*` and `?` as in a shell); all without one.

        Raises UsageProblem for a pattern that fits none of them.
        """
        for pattern in patterns:
            if not any(_fits(host, pattern) for host in hosts):
                raise UsageProblem(
                    f"{pattern!r} fits none of the chosen hosts",
                    where="--limit",
                    next_step=f"chosen are: {', '.join(host.name for host in hosts)}",
                )
        return tuple(h for h in hosts if not patterns or any(_fits(h, pattern) for pattern in patterns))

    def local(self) -> HostSettings:
        """This machine: the host called `local` where the file has one, else the defaults."""
        host = self.hosts.get(LOCAL_NAME, replace(self.defaults, name=LOCAL_NAME))
        return replace(host, local=True)


def _fits(host: HostSettings, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (host.name, host.group, host.server) if name)
