"""A stand-in for the Docker engine: the few calls of its HTTP API that the adapter's commands lead to, one container.

There is no image and no file system of the container's own. The process is real, and so are its end and its start: as
root it is the first process of a process namespace, as in a container on the host's network. As a program this is a
stand-in for the `docker` command (`fake_docker_engine.py --host unix:///SOCKET restart -t 60 NAME`), for machines
without one.
"""

import contextlib
import datetime
import http.client
import json
import os
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler
from pathlib import Path

STREAMS = {"stdout": 1, "stderr": 2}
CONTAINER_ID = "f" * 64  # the real command asks by it once it has inspected


class FakeDockerEngine:
    """The engine at `address`, with the container `name`, which runs `argv` in `cwd`."""

    def __init__(self, directory, name, argv, cwd):
        self.name, self.argv, self.cwd = name, argv, cwd
        self.lock = threading.RLock()
        self.process, self.pid, self.started_at = None, 0, "0001-01-01T00:00:00Z"
        self.lines = []  # (unix time, stream, bytes)
        socket_path = directory / "docker.sock"
        self.address = f"unix://{socket_path}"
        handler = type("Handler", (Handler,), {"engine": self})
        socketserver.ThreadingUnixStreamServer.daemon_threads = True
        self.server = socketserver.ThreadingUnixStreamServer(str(socket_path), handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.stop(5)
        self.server.shutdown()
        self.server.server_close()

    def start(self):
        with self.lock:
            if self.running():
                return
            apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if os.geteuid() == 0 else []
            self.process = subprocess.Popen(
                [*apart, *self.argv],
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self.pid = self._first_process() if apart else self.process.pid
            self.started_at = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
            for stream in STREAMS:
                threading.Thread(target=self._keep, args=(stream, getattr(self.process, stream)), daemon=True).start()

    def _first_process(self):
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while self.process.poll() is None:
            if pids := children.read_text().split():
                return int(pids[0])
            time.sleep(0.01)
        return 0

    def _keep(self, stream, pipe):
        for line in pipe:
            self.lines.append((time.time(), stream, line))

    def running(self):
        return self.process is not None and self.process.poll() is None

    def stop(self, patience):
        """TERM to the first process, KILL to all after `patience` seconds."""
        with self.lock:
            if not self.running():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def inspect(self):
        running = self.running()
        code = 0 if running or self.process is None else self.process.returncode
        return {
            "Id": CONTAINER_ID,
            "Name": f"/{self.name}",
            "Config": {"Tty": False},
            "HostConfig": {"NetworkMode": "host"},
            "NetworkSettings": {"Ports": {}},
            "State": {
                "Status": "running" if running else "exited",
                "Running": running,
                "OOMKilled": False,
                "Pid": self.pid if running else 0,
                "ExitCode": code,
                "StartedAt": self.started_at,
            },
        }

    def logs(self, since):
        """In the engine's framing of the two streams."""
        return b"".join(
            struct.pack(">BxxxL", STREAMS[stream], len(line)) + line
            for when, stream, line in list(self.lines)
            if when >= since
        )


class Handler(BaseHTTPRequestHandler):
    engine = None

    def do_HEAD(self):
        self.answer(200, b"")

    def do_GET(self):
        path, query = self.asked()
        if path == "_ping":
            return self.answer(200, b"OK")
        name, _, what = path.removeprefix("containers/").rpartition("/")
        if name not in (self.engine.name, CONTAINER_ID):
            return self.answer(404, {"message": f"No such container: {name}"})
        if what == "json":
            return self.answer(200, self.engine.inspect())
        return self.answer(200, self.engine.logs(float(query.get("since", ["0"])[0])))

    def do_POST(self):
        path, query = self.asked()
        name, _, action = path.removeprefix("containers/").rpartition("/")
        if name not in (self.engine.name, CONTAINER_ID):
            return self.answer(404, {"message": f"No such container: {name}"})
        if action in ("stop", "restart"):
            self.engine.stop(float(query.get("t", ["10"])[0]))
        if action in ("start", "restart"):
            self.engine.start()
        return self.answer(204, b"")

    def asked(self):
        """(path without the API's version, query)."""
        parts = urllib.parse.urlsplit(self.path)
        words = parts.path.strip("/").split("/")
        return "/".join(words[1:] if words[0].startswith("v1.") else words), urllib.parse.parse_qs(parts.query)

    def answer(self, status, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Api-Version", "1.43")
        self.send_header("Ostype", "linux")
        self.send_header("Content-Type", "text/plain" if isinstance(body, bytes) else "application/json")
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def fake_docker(words):
    """The command: prints and exits as `docker` does for inspect, logs, start, stop and restart."""
    (_, address, command, *options), name = words[:-1], words[-1]
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(address.removeprefix("unix://"))
    if command == "logs":
        since = datetime.datetime.fromisoformat(options[options.index("--since") + 1].replace("Z", "+00:00"))
        connection.request("GET", f"/containers/{name}/logs?since={since.timestamp()}")
    elif command == "inspect":
        connection.request("GET", f"/containers/{name}/json")
    else:
        seconds = options[options.index("-t") + 1] if "-t" in options else "10"
        connection.request("POST", f"/containers/{name}/{command}?t={seconds}")
    response = connection.getresponse()
    data = response.read()
    if response.status >= 400:
        sys.exit(f"Error response from daemon: {json.loads(data)['message']}")
    if command == "logs":
        while data:
            stream, length = struct.unpack(">BxxxL", data[:8])
            os.write(stream, data[8 : 8 + length])
            data = data[8 + length :]
    else:
        print(json.dumps([json.loads(data)]) if command == "inspect" else name)


if __name__ == "__main__":
    fake_docker(sys.argv[1:])
