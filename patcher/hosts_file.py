"""hosts.toml: found, read strictly and checked.

A key that the tool does not know is refused with its file and full name, because a misspelt `requrie = false` that is
silently ignored is found out on a production host.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from patcher.errors import UsageProblem
from patcher.hosts import Config, HostSettings, ServiceSettings
from patcher.typed import Misfit, typed

DERIVED = ("name", "head", "config")  # of HostSettings, and no keys of the file


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
    defaults = _host("", shared, "defaults", path)
    hosts = {}
    for name, entry in _table(document.get("hosts", {}), "hosts", path).items():
        table = _merge(shared, _table(entry, f"hosts.{name}", path))
        host = _host(name, table, f"hosts.{name}", path)
        hosts[name] = host if host.local or host.address else replace(host, address=name)
    _check_together(hosts, path)
    heads: dict[str, str] = {}
    for host in hosts.values():
        if host.server:
            heads.setdefault(host.server, host.name)
    hosts = {name: replace(host, head=heads.get(host.server, "")) for name, host in hosts.items()}
    return Config(hosts=hosts, defaults=defaults, source=path)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on `base`, table by table, except `service.args`, which is one value: flags do not add up."""
    merged = dict(base)
    for key, value in over.items():
        inherited = merged.get(key)
        if isinstance(inherited, Mapping) and isinstance(value, Mapping) and key != "args":
            value = _merge(inherited, value)
        merged[key] = value
    return merged


def _host(name: str, table: Mapping[str, Any], where: str, path: Path) -> HostSettings:
    """The host of a table; `where` is the table's name in the file."""
    for key in DERIVED:
        if key in table:
            raise _refuse(path, f"{where}.{key}", "unknown key; the host's name is the name of its table")
    try:
        host = typed({**_with_text_flags(table), "name": name}, HostSettings)
    except Misfit as misfit:
        raise _refuse(path, ".".join((where, *misfit.path)), misfit.what) from misfit
    _check_service(host.service, f"{where}.service", path, is_host=bool(name))
    return host


def _with_text_flags(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """`table` with the numbers in service.args as the words that they are on a command line."""
    service = table.get("service")
    args = service.get("args") if isinstance(service, Mapping) else None
    if not isinstance(service, Mapping) or not isinstance(args, Mapping):
        return table
    texts = {flag: str(value) if type(value) in (int, float) else value for flag, value in args.items()}
    return {**table, "service": {**service, "args": texts}}


def _check_service(service: ServiceSettings, where: str, path: Path, is_host: bool) -> None:
    """The keys that a kind of service cannot do without, or has no use for."""
    needed = {"systemd": "unit", "supervisor": "program", "docker": "container", "command": "restart"}.get(service.kind)
    if needed and not getattr(service, needed) and is_host:
        raise _refuse(path, f"{where}.{needed}", f"kind = {service.kind!r} needs this key")
    if service.args and service.kind != "process":
        raise _refuse(path, f"{where}.args", "only kind = 'process' sets flags; put them where the service is defined")
    for flag in service.args:
        if not flag.startswith("--"):
            raise _refuse(path, f"{where}.args.{flag}", "a flag of the server starts with --")


def _check_together(hosts: Mapping[str, HostSettings], path: Path) -> None:
    """What hosts may not say of themselves beside the others."""
    for host in hosts.values():
        if host.group in hosts:
            raise _refuse(path, f"hosts.{host.name}.group", f"{host.group!r} is a host already")
        if host.group and any(host.group == other.server for other in hosts.values()):
            raise _refuse(path, f"hosts.{host.name}.group", f"{host.group!r} is a multi-node server already")
        if host.server and host.service.kind == "command" and not (host.service.stop and host.service.start):
            raise _refuse(
                path,
                f"hosts.{host.name}.service",
                "a node of a multi-node server needs stop and start: all nodes are stopped before one is started",
            )
        if host.venv and host.site_packages:
            raise _refuse(path, f"hosts.{host.name}", "venv and site_packages exclude each other")


def _table(value: Any, name: str, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refuse(path, name, "must be a table")
    return value


def _refuse(path: Path, key: str, why: str) -> UsageProblem:
    return UsageProblem(f"{key}: {why}", where=str(path), next_step=f"correct {key} in {path}")
