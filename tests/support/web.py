"""A small HTTP server on loopback."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Pages:
    """/large: 3 MB, with a length. /close: 3 MB that end with the connection. /chunks: 3 MB in chunks."""

    large = bytes(range(250)) * 12_000

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.port = self._server.server_address[1]

    def __enter__(self) -> Pages:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/large":
            self.send_header("Content-Length", str(len(Pages.large)))
        elif self.path == "/close":
            self.send_header("Connection", "close")
        else:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.path == "/chunks":
            for start in range(0, len(Pages.large), 100_000):
                self.wfile.write(b"%x\r\n%b\r\n" % (100_000, Pages.large[start : start + 100_000]))
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(Pages.large)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""
