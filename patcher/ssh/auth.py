"""Which keys to offer to a server, and in which order.

Servers count every key that they refuse and hang up after a few (MaxAuthTries),
so the keys that the configuration names go first, the agent's others last, and
not at all under IdentitiesOnly.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import paramiko
from paramiko.agent import AgentSSH

from patcher.errors import AuthenticationProblem, HostUnreachable
from patcher.ssh.config import SshTarget

LOCKED = " needs a passphrase and no agent holds it"


class KeyAgent(AgentSSH):
    """The key agent behind one socket: paramiko's own class knows only SSH_AUTH_SOCK."""

    def __init__(self, path: str) -> None:
        super().__init__()
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(path)
        except OSError:
            link.close()
            raise
        self._connect(link)  # type: ignore[attr-defined]  # not in the stubs

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


def authenticate(transport: paramiko.Transport, target: SshTarget) -> None:
    """Log in on a connected TRANSPORT. Raises AuthenticationProblem, saying what was tried."""
    tried: list[str] = []
    notes: list[str] = []
    partly = False
    with contextlib.ExitStack() as stack:
        for label, key in _candidates(target, notes, stack):
            try:
                tried.append(label)
                transport.auth_publickey(target.user, key)
            except paramiko.AuthenticationException as refusal:
                if _timed_out(refusal):
                    raise no_answer(target, f"an answer to the login of {target.user}") from refusal
                if not transport.is_active():
                    notes.append(f"the server hung up after {len(tried)} keys ({refusal})")
                    break
                if isinstance(refusal, paramiko.BadAuthenticationType) and not partly:
                    raise _takes_no_keys(target, refusal) from None
                continue
            except (paramiko.SSHException, EOFError, OSError) as error:
                notes.append(f"{label}: {str(error) or type(error).__name__}")
                if not transport.is_active():
                    if len(tried) == 1:
                        raise _broken(target, error) from error
                    notes.append(f"the server hung up after {len(tried)} keys")
                    break
                continue
            if transport.is_authenticated():
                return
            partly = True
            notes.append(f"{label} was taken, but the server wants a second factor")
    if not partly and transport.is_active() and _enters_without_key(transport, target, bool(tried)):
        return
    raise AuthenticationProblem(
        f"the server refuses {target.user}" + (f" with {len(tried)} keys" if tried else ": there is no key to offer"),
        where=target.name,
        detail="\n".join([*(f"offered {label}" for label in tried), *notes]),
        next_step=_advice(target, notes),
    )


def _enters_without_key(transport: paramiko.Transport, target: SshTarget, tried: bool) -> bool:
    """Whether the server wants no key, as some do; asked after the keys, since it costs two round trips."""
    try:
        transport.auth_none(target.user)
    except paramiko.BadAuthenticationType as refusal:
        if "publickey" not in refusal.allowed_types:
            raise _takes_no_keys(target, refusal) from None
    except paramiko.AuthenticationException as refusal:
        if _timed_out(refusal):
            raise no_answer(target, f"an answer to the login of {target.user}") from refusal
        return False  # a plain no
    except (paramiko.SSHException, EOFError, OSError) as error:
        if not tried:
            raise _broken(target, error) from error
    return transport.is_authenticated()


def _takes_no_keys(target: SshTarget, refusal: paramiko.BadAuthenticationType) -> AuthenticationProblem:
    return AuthenticationProblem(
        f"the server takes no keys for {target.user}, only {', '.join(refusal.allowed_types)}",
        where=target.name,
        next_step="allow PubkeyAuthentication for this user",
    )


def no_answer(target: SshTarget, awaited: str) -> HostUnreachable:
    """A server that took the connection, and then says nothing."""
    return HostUnreachable(
        f"{target.hostname}:{target.port} took the connection, and then nothing came: "
        f"waited {target.connect_timeout:g} s for {awaited}",
        where=target.name,
        next_step=f"see what `ssh -v {target.name} true` waits for: a machine that hangs or swaps, a name service that "
        "does not answer its sshd, or a port that is no sshd's; ConnectTimeout in ssh_config sets how long "
        "is waited",
    )


def _timed_out(refusal: paramiko.AuthenticationException) -> bool:
    """paramiko has no type of its own for it."""
    return str(refusal) == "Authentication timeout."


def _broken(target: SshTarget, error: Exception) -> HostUnreachable:
    return HostUnreachable(
        f"the connection broke during login: {str(error) or type(error).__name__}",
        where=target.name,
        next_step="try again",
    )


def _advice(target: SshTarget, notes: list[str]) -> str:
    locked = [note.removesuffix(LOCKED) for note in notes if note.endswith(LOCKED)]
    if locked:
        return f"unlock the key in an agent first: {shlex.join(['ssh-add', locked[0]])}"
    if any("hung up" in note for note in notes):
        return f"name the right key for {target.name} in ssh_config: IdentityFile and IdentitiesOnly yes"
    return f"make `ssh {target.user}@{target.name} true` work without a question"


def _candidates(
    target: SshTarget, notes: list[str], stack: contextlib.ExitStack
) -> Iterator[tuple[str, paramiko.PKey]]:
    """Each key to offer, with a label for messages; NOTES collects why keys were left out."""
    held = {key.asbytes(): key for key in _agent_keys(target, notes, stack)}
    offered = set()
    for path in target.identity_files:
        public = _public_blob(path)
        if public is not None and public in held:
            offered.add(public)
            yield f"{path} (from the agent)", held[public]
            continue
        key = _load(path, notes)
        if key is not None and key.asbytes() in held:
            offered.add(key.asbytes())
        if key is not None:
            yield str(path), key
    if target.identities_only:
        return
    for blob, key in held.items():
        if blob not in offered:
            yield f"the agent's {getattr(key, 'comment', '') or key.get_name()}", key


def _agent_keys(target: SshTarget, notes: list[str], stack: contextlib.ExitStack) -> tuple[paramiko.PKey, ...]:
    if not target.identity_agent:
        return ()
    try:
        agent = KeyAgent(target.identity_agent)
        stack.callback(agent.close)
        return agent.get_keys()
    except (OSError, paramiko.SSHException) as error:
        notes.append(f"the key agent at {target.identity_agent} does not answer: {error}")
        return ()


def _load(path: Path, notes: list[str]) -> paramiko.PKey | None:
    """The private key in PATH, or None with a note that says why it cannot be used."""
    try:
        return paramiko.PKey.from_path(path)
    except FileNotFoundError:
        return None  # the default names need not exist
    except (paramiko.PasswordRequiredException, TypeError):
        # cryptography's word for "encrypted, and no passphrase was given" is TypeError
        notes.append(f"{path}{LOCKED}")
    except (OSError, ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
        notes.append(f"{path} cannot be read: {error}")
    return None


def _public_blob(path: Path) -> bytes | None:
    """The public half, from PATH.pub or from PATH itself where only the public half is on disk."""
    for candidate in (path.with_name(path.name + ".pub"), path):
        try:
            fields = candidate.read_bytes().split()
            if len(fields) >= 2 and not fields[0].startswith(b"-----"):
                return base64.b64decode(fields[1], validate=True)
        except (OSError, binascii.Error):
            continue  # absent or no public key: the next candidate
    return None
