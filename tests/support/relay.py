"""A TCP relay on loopback to put in front of a server: it delays, counts, and cuts the line when told to."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

CHUNK = 1 << 16


class Relay:
    """Passes bytes between `port` and the port of a server on this machine.

    delay: seconds that each piece spends under way, in each direction. cut_when: asked after each piece from the
    client; once it says True every connection is cut, that piece is lost, and new connections are refused.
    Attributes: up, down (bytes from and to the client), turns (how often the client spoke after the server had).
    """

    def __init__(self, to_port: int, *, delay: float = 0.0, cut_when: Callable[[Relay], bool] = lambda relay: False):
        self._to = to_port
        self._delay = delay
        self._cut_when = cut_when
        self._lock = threading.Lock()
        self._links: list[socket.socket] = []
        self._server_spoke = True
        self.up = self.down = self.turns = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.cut()

    def cut(self) -> None:
        """End every connection without a farewell, and take no more."""
        for link in (self._listener, *self._links):
            with contextlib.suppress(OSError):  # it may not be connected any more
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # cut
                return
            server = socket.create_connection(("127.0.0.1", self._to))
            self._links += [client, server]
            for source, sink, upwards in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass, args=(source, sink, upwards), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, upwards: bool) -> None:
        try:
            while data := source.recv(CHUNK):
                self._count(len(data), upwards)
                if upwards and self._cut_when(self):
                    return self.cut()
                time.sleep(self._delay)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # cut, or one side is gone: the other side notices for itself

    def _count(self, size: int, upwards: bool) -> None:
        with self._lock:
            if upwards:
                self.up += size
                self.turns += self._server_spoke
            else:
                self.down += size
            self._server_spoke = not upwards
