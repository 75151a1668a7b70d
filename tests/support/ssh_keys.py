"""Keys of a user, and an agent that holds some."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path


def new_key(path: Path, kind: str = "ed25519", passphrase: str = "", *options: str) -> Path:
    """A new private key at `path`, its public half beside it. options: more words for ssh-keygen."""
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, *options, "-f", str(path)], check=True)
    return path


class RunningAgent:
    """A real ssh-agent that listens on `socket`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "agent"
        self._process = subprocess.Popen(["ssh-agent", "-D", "-a", str(self.socket)], stdout=subprocess.DEVNULL)
        while not self.socket.exists():
            time.sleep(0.02)

    def add(self, key: Path, passphrase: str = "") -> None:
        """Give it a key, as ssh-add does for a user who types the passphrase."""
        ask = self.folder / "askpass"
        ask.write_text(f"#!/bin/sh\necho '{passphrase}'\n")
        ask.chmod(0o700)
        subprocess.run(
            ["ssh-add", "-q", str(key)],
            check=True,
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                "SSH_AUTH_SOCK": str(self.socket),
                "SSH_ASKPASS": str(ask),
                "SSH_ASKPASS_REQUIRE": "force",
            },
        )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
