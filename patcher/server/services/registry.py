"""The service of a host: the restart adapter that its settings name."""

from __future__ import annotations

from patcher.hosts import ServiceSettings
from patcher.server.services.base import Service, ServiceHost
from patcher.server.services.command import CommandService
from patcher.server.services.docker import DockerService
from patcher.server.services.process import ProcessService
from patcher.server.services.supervisor import SupervisorService
from patcher.server.services.systemd import SystemdService

__all__ = ["Service", "ServiceHost", "make_service"]

ADAPTERS: dict[str, type[Service]] = {
    adapter.kind: adapter
    for adapter in (ProcessService, SystemdService, SupervisorService, DockerService, CommandService)
}


def make_service(settings: ServiceSettings, host: ServiceHost) -> Service | None:
    """The adapter for `settings.kind`; None for `none`, a host whose server is nobody's concern here."""
    return None if settings.kind == "none" else ADAPTERS[settings.kind](settings, host)
