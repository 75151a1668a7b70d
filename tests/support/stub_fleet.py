"""Several stub hosts, each behind a real sshd of its own, and the hosts.toml that lists them."""

from pathlib import Path

from scripts.rig.sshd import Sshd
from tests.support.stub_host import StubHost

NAMES = [f"gpu{number}" for number in range(1, 9)]


class Fleet:
    """Hosts `gpu1` ..: a stub installation and an sshd each; and the hosts.toml that lists them."""

    def __init__(self, home: Path, count: int) -> None:
        self.config = home / "hosts.toml"
        self.ssh_config = home / "ssh_config"
        self.hosts: dict[str, StubHost] = {}
        self.sshds: dict[str, Sshd] = {}
        for number, name in enumerate(NAMES[:count], 1):
            (home / name).mkdir()
            self.hosts[name] = StubHost(home / name)
            self.sshds[name] = Sshd(home / f"{name}-sshd", alias=name, address=f"127.0.0.{number}")
        self.ssh_config.write_text("".join(sshd.ssh_config.read_text() for sshd in self.sshds.values()))
        self.series_root = self.hosts["gpu1"].series_root

    def configure(self, **keys: str) -> None:
        """Write hosts.toml; `keys`: more lines for the host of that name."""
        self.config.write_text(
            "".join(
                f"""
[hosts.{name}]
venv = "{host.venv}"
endpoint = {{ port = {host.port} }}
ready = {{ deadline = 20 }}
smoke = {{ suite = "{host.suite}" }}
kernels = {{ require = false }}
{keys.get(name, "")}
"""
                for name, host in self.hosts.items()
            )
        )

    def stop(self) -> None:
        for sshd in self.sshds.values():
            sshd.stop()
        for host in self.hosts.values():
            host.stop()

    def patched(self) -> list[str]:
        return [name for name, host in self.hosts.items() if (host.site_packages / "sglang/srt/ddtree.py").exists()]

    def drift(self, name: str) -> None:
        path = self.hosts[name].site_packages / "sglang/srt/worker.py"
        path.write_bytes(path.read_bytes() + b"# edited\n")
