"""hosts.toml -> typed settings.

The file is read strictly: a key that the tool does not know is refused with its file and full name, because a misspelt
`requrie = false` that is silently ignored is found out on a production host. Every setting has a default, so a host
needs no entry at all: an address that is not in the file is a host by itself, and `ssh -G` says how to reach it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patcher.errors import UsageProblem

SERVICE_KINDS = ("process", "systemd", "supervisor", "docker", "command", "none")
SYSTEMD_SCOPES = ("system", "user")
LOCAL_NAME = "local"


@dataclass(frozen=True)
class ServiceSettings:
    """How the server is stopped and started.

    `args` are flags set on the server's own command line while the patch is in place (adapter `process`): a string is
    the flag's value, True is a flag without value, False takes the flag off. `restart`, `stop` and `start` are argv
    lists of the adapter `command`. `control` is the argv of the program that steers the supervisor or container, where
    it is not plain `supervisorctl` or `docker` (["/opt/sup/bin/supervisorctl", "-c", FILE], ["podman"]). `log` is the
    file the server writes to, where it cannot be found out.
    """

    kind: str = "process"
    unit: str = ""
    scope: str = "system"
    program: str = ""
    container: str = ""
    control: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    log: str = ""
    args: Mapping[str, str | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class EndpointSettings:
    """Where the server answers, as seen from its own host. `port` None: as on the serving process's command line."""

    host: str = "127.0.0.1"
    port: int | None = None
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


@dataclass(frozen=True)
class ReadySettings:
    """`deadline`: seconds from the start of the server until it must have answered."""

    deadline: float = 1800.0


@dataclass(frozen=True)
class SmokeSettings:
    """`suite`: the path of a suite file, or the name of one in configs/; empty: the default suite."""

    suite: str = ""


@dataclass(frozen=True)
class KernelSettings:
    """`require` False turns a missing kernel into a warning."""

    require: bool = True


@dataclass(frozen=True)
class HostSettings:
    """One host. `address` is what ssh is asked for (a name from ssh_config, or an address).

    Hosts that name the same `server` are the nodes of one multi-node SGLang server. `head` is not in the file: it is
    the host of the server's node rank 0, the first one of the file, which answers requests; the host itself otherwise.
    Nor is `config`: the hosts file, where one was named on the command line.
    """

    name: str
    address: str = ""
    user: str = ""
    port: int | None = None
    local: bool = False
    venv: str = ""
    site_packages: str = ""
    sudo: bool = False
    group: str = ""
    server: str = ""
    head: str = field(default="", metadata={"derived": True})
    config: Path | None = field(default=None, metadata={"derived": True})
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
            for host in members or [dataclasses.replace(self.defaults, name=name, address=name)]:
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
        host = self.hosts.get(LOCAL_NAME, dataclasses.replace(self.defaults, name=LOCAL_NAME))
        return dataclasses.replace(host, local=True)


def _fits(host: HostSettings, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (host.name, host.group, host.server) if name)


def searched() -> tuple[Path, ...]:
    """Where the hosts file is looked for when none is named, in this order."""
    return Path("configs/hosts.toml"), Path.home() / ".config/ddtree-patch/hosts.toml"


def load_config(explicit: Path | None = None) -> Config:
    """Read `explicit`, or the first file of `searched`.

    Without any, the configuration is empty. Raises UsageProblem for a file that is missing (when named), is not TOML,
    or has a key, type or value that the tool does not know.
    """
    if explicit is not None:
        return _read(explicit)
    for candidate in searched():
        if candidate.is_file():
            return _read(candidate)
    return Config(hosts={}, defaults=HostSettings(name=""), source=None)


def _read(path: Path) -> Config:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageProblem(
            f"cannot read the hosts file: {error.strerror}", where=str(path), next_step="check --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageProblem(
            f"not a TOML file: {error}", where=str(path), next_step="correct the file at that place"
        ) from error
    for key in document:
        if key not in ("defaults", "hosts"):
            raise _refuse(path, key, "unknown table; the file has [defaults] and [hosts.NAME]")
    shared = _table(document.get("defaults", {}), "defaults", path)
    for key in ("name", "address", "local", "group", "server"):
        if key in shared:
            raise _refuse(path, f"defaults.{key}", "this key belongs to one host, not to the defaults")
    defaults = _build(HostSettings, {"name": ""} | shared, "defaults", path)
    hosts = {}
    for name, entry in _table(document.get("hosts", {}), "hosts", path).items():
        where = f"hosts.{name}"
        entry = _table(entry, where, path)
        if "name" in entry:
            raise _refuse(path, f"{where}.name", "unknown key; the host's name is the name of its table")
        host = _build(HostSettings, {"name": name} | _merge(shared, entry), where, path)
        hosts[name] = host if host.local or host.address else dataclasses.replace(host, address=name)
    heads: dict[str, str] = {}
    for host in hosts.values():
        if host.group in hosts:
            raise _refuse(path, f"hosts.{host.name}.group", f"{host.group!r} is a host already")
        if host.group and any(host.group == other.server for other in hosts.values()):
            raise _refuse(path, f"hosts.{host.name}.group", f"{host.group!r} is a multi-node server already")
        if host.server:
            heads.setdefault(host.server, host.name)
            hosts[host.name] = dataclasses.replace(host, head=heads[host.server])
        if host.server and host.service.kind == "command" and not (host.service.stop and host.service.start):
            raise _refuse(
                path,
                f"hosts.{host.name}.service",
                "a node of a multi-node server needs stop and start: all nodes are stopped before one is started",
            )
        if host.venv and host.site_packages:
            raise _refuse(path, f"hosts.{host.name}", "venv and site_packages exclude each other")
    return Config(hosts=hosts, defaults=defaults, source=path)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on `base`, table by table, except `service.args`, which is one value: flags do not add up."""
    merged = dict(base)
    for key, value in over.items():
        inherited = merged.get(key)
        both = isinstance(inherited, Mapping) and isinstance(value, Mapping) and key != "args"
        merged[key] = _merge(inherited, value) if both else value
    return merged


def _build(cls: type, table: Mapping[str, Any], where: str, path: Path) -> Any:
    """An instance of the dataclass `cls` from a TOML table; refuses what is not a field of it, or of another type."""
    fields = {f.name: f for f in dataclasses.fields(cls) if not f.metadata.get("derived")}
    values = {}
    for key, value in table.items():
        name = f"{where}.{key}"
        if key not in fields:
            raise _refuse(path, name, f"unknown key; known here: {', '.join(k for k in fields if k != 'name')}")
        values[key] = _value(fields[key], value, name, path)
    built = cls(**values)
    _check(built, where, path)
    return built


def _value(spec: dataclasses.Field, value: Any, name: str, path: Path) -> Any:
    kind = spec.type
    if kind in _NESTED:
        return _build(_NESTED[kind], _table(value, name, path), name, path)
    if spec.name == "args":
        return _flags(value, name, path)
    if kind == "tuple[str, ...]":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise _refuse(path, name, "must be a list of strings, one a word of the command (no shell)")
        return tuple(value)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "int | None" and isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= 65535:
            raise _refuse(path, name, f"{value} is not a port number")
        return value
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0 < value < float("inf"):
            raise _refuse(path, name, "must be a number of seconds above 0")
        return float(value)
    expected = {"bool": "true or false", "str": "a string", "int | None": "a whole number", "float": "a number"}[kind]
    raise _refuse(path, name, f"must be {expected}, not {value!r}")


def _flags(value: Any, name: str, path: Path) -> dict[str, str | bool]:
    flags: dict[str, str | bool] = {}
    for flag, setting in _table(value, name, path).items():
        if not flag.startswith("--"):
            raise _refuse(path, f"{name}.{flag}", "a flag of the server starts with --")
        if not isinstance(setting, (str, bool, int, float)):
            raise _refuse(path, f"{name}.{flag}", "must be a string, number, true (bare flag) or false (flag off)")
        flags[flag] = setting if isinstance(setting, bool) else str(setting)
    return flags


def _check(built: Any, where: str, path: Path) -> None:
    """Values that must be one of a few, and keys that a kind of service cannot do without."""
    if not isinstance(built, ServiceSettings):
        return
    if built.kind not in SERVICE_KINDS:
        raise _refuse(path, f"{where}.kind", f"{built.kind!r} is not one of {', '.join(SERVICE_KINDS)}")
    if built.scope not in SYSTEMD_SCOPES:
        raise _refuse(path, f"{where}.scope", f"{built.scope!r} is not one of {', '.join(SYSTEMD_SCOPES)}")
    needed = {"systemd": "unit", "supervisor": "program", "docker": "container", "command": "restart"}.get(built.kind)
    if needed and not getattr(built, needed) and where.startswith("hosts."):
        raise _refuse(path, f"{where}.{needed}", f"kind = {built.kind!r} needs this key")
    if built.args and built.kind != "process":
        raise _refuse(path, f"{where}.args", "only kind = 'process' sets flags; put them where the service is defined")


def _table(value: Any, name: str, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refuse(path, name, "must be a table")
    return value


def _refuse(path: Path, key: str, why: str) -> UsageProblem:
    return UsageProblem(f"{key}: {why}", where=str(path), next_step=f"correct {key} in {path}")


_NESTED = {
    cls.__name__: cls for cls in (ServiceSettings, EndpointSettings, ReadySettings, SmokeSettings, KernelSettings)
}
