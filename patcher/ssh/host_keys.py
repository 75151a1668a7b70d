"""Is the key that a server shows the one that known_hosts has for it?

``ssh-keygen -F`` looks the entries up, so hashed names, patterns, markers and
``[host]:port`` mean here what they mean to ssh. A key is never added.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from patcher.errors import HostKeyProblem, HostUnreachable
from patcher.ssh.config import SshTarget

REVOKED, AUTHORITY = "@revoked", "@cert-authority"


@dataclass(frozen=True)
class KnownKey:
    """One entry of known_hosts. key_type is the name in the file, such as ``ssh-ed25519``."""

    key_type: str
    blob: bytes
    marker: str
    file: Path


def known_keys(target: SshTarget) -> tuple[KnownKey, ...]:
    """All entries for TARGET in its known_hosts files. Raises HostUnreachable (no ssh-keygen)."""
    return tuple(key for file in target.known_hosts for key in _look_up(target.known_as, file))


def check(target: SshTarget, shown_type: str, shown: bytes, known: tuple[KnownKey, ...]) -> None:
    """Raise HostKeyProblem unless SHOWN (the key blob that the server sent) is known for TARGET.

    A host on another port than 22 may also be known by its plain name, but only by the very same
    key: that is OpenSSH's rule.
    """
    if any(key.marker == REVOKED and key.blob == shown for key in known):
        raise HostKeyProblem(
            "the host shows a key that known_hosts revokes",
            where=target.name,
            next_step="do not connect: ask whoever runs the host",
            detail=_facts(target, shown_type, shown),
        )
    plain = tuple(key for key in known if not key.marker)
    if any(key.blob == shown for key in plain):
        return
    if not plain and not target.host_key_alias and target.port != 22:
        by_name = tuple(key for file in target.known_hosts for key in _look_up(target.hostname.lower(), file))
        if any(key.blob == shown and not key.marker for key in by_name):
            return
    facts = _facts(target, shown_type, shown)
    add = _adding(target)
    if any(key.key_type == shown_type for key in plain):
        file = next(key.file for key in plain if key.key_type == shown_type)
        forget = shlex.join(["ssh-keygen", "-R", target.known_as, "-f", str(file)])
        raise HostKeyProblem(
            "the host key has changed: another machine may be answering in its place",
            where=target.name,
            detail=facts,
            next_step=f"if you know why it changed: {forget} && {add}",
        )
    if plain:
        have = ", ".join(sorted({key.key_type for key in plain}))
        raise HostKeyProblem(
            f"known_hosts has keys of this host ({have}), but not the {shown_type} key that it shows",
            where=target.name,
            detail=facts,
            next_step=f"compare the fingerprint, then: {add}",
        )
    what = "the host key is not known"
    if any(key.marker == AUTHORITY for key in known):
        what += "; known_hosts trusts a certificate authority for this host, but host certificates are not checked here"
    if target.keeps_keys_in is None:
        add = f"name a UserKnownHostsFile for {target.name} in ssh_config, where there is none that keeps a key; {add}"
    raise HostKeyProblem(
        what, where=target.name, detail=facts, next_step=f"compare the fingerprint with the host's, then: {add}"
    )


def algorithms(known: tuple[KnownKey, ...], offered: tuple[str, ...]) -> tuple[str, ...]:
    """OFFERED signature algorithms, those first whose keys are known: a server has several keys and
    shows the one that the client likes best."""
    types = {key.key_type for key in known if not key.marker}

    def is_known(algorithm: str) -> bool:
        return ("ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm) in types

    return tuple(sorted(offered, key=lambda algorithm: not is_known(algorithm)))


def _look_up(name: str, file: Path) -> list[KnownKey]:
    if not file.exists():
        return []
    try:
        done = subprocess.run(
            ["ssh-keygen", "-F", name, "-f", str(file)], stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )
    except FileNotFoundError:
        raise HostUnreachable(
            "no ssh-keygen is installed here, so host keys cannot be checked",
            where=name,
            next_step="install the OpenSSH client (openssh-client)",
        ) from None
    keys = []
    for line in done.stdout.decode(errors="replace").splitlines():
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) >= 3:
            keys.append(KnownKey(fields[1], base64.b64decode(fields[2]), marker, file))
    return keys


def _facts(target: SshTarget, shown_type: str, shown: bytes) -> str:
    digest = base64.b64encode(hashlib.sha256(shown).digest()).decode().rstrip("=")
    files = ", ".join(map(str, target.known_hosts)) or "none"
    return f"{target.known_as} shows {shown_type} SHA256:{digest}; looked in: {files}"


def _adding(target: SshTarget) -> str:
    """The shell command that adds the key which the host shows to the user's known_hosts."""
    if target.ssh:  # ssh-keyscan knows no jumps: ssh itself adds the key, for this host and for none of its jumps
        return shlex.join([*target.ssh, "-o", "StrictHostKeyChecking=accept-new", target.name, "true"])
    scan = shlex.join(["ssh-keyscan", "-p", str(target.port), target.hostname])
    if target.host_key_alias:
        # ssh-keyscan writes the address; under an alias the line must begin with the alias.
        scan += f" | sed {shlex.quote('s/^[^ #]*/' + target.host_key_alias + '/')}"
    return f"{scan} >> {shlex.quote(str(target.keeps_keys_in or Path('~/.ssh/known_hosts').expanduser()))}"
