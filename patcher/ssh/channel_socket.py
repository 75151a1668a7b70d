"""An SSH channel that http.client can use like a socket."""

from __future__ import annotations

import io
from typing import Any

import paramiko


class ChannelSocket:
    """The part of a socket that http.client needs, over a direct-tcpip channel.

    paramiko closes a channel at the first ``close``; a socket lives on until the files made from it
    are closed too, and http.client relies on that for responses that end with the connection.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._files = 0
        self._closed = False

    def sendall(self, data: bytes) -> None:
        self._channel.sendall(data)

    def recv(self, size: int) -> bytes:
        return self._channel.recv(size)

    def settimeout(self, seconds: float | None) -> None:
        self._channel.settimeout(seconds)

    def gettimeout(self) -> float | None:
        return self._channel.gettimeout()

    def makefile(self, mode: str = "rb", buffering: int | None = None) -> io.BufferedReader:
        if mode not in ("r", "rb"):
            raise ValueError(f"only reading is supported, not {mode!r}")
        self._files += 1
        return io.BufferedReader(_ChannelFile(self), io.DEFAULT_BUFFER_SIZE)

    def close(self) -> None:
        self._closed = True
        self._release()

    def shutdown(self, how: int) -> None:
        self._channel.shutdown(how)

    def file_closed(self) -> None:
        self._files -= 1
        self._release()

    def _release(self) -> None:
        if self._closed and self._files <= 0:
            self._channel.close()


class _ChannelFile(io.RawIOBase):
    def __init__(self, owner: ChannelSocket) -> None:
        self._owner = owner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._owner.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._owner.file_closed()
