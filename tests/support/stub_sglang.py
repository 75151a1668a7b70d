"""A stub of an SGLang server, for what a real one cannot be made to do on demand. It has no model.

As a thread: `StubServer(mode="...")`. As a process: copied to a stub package `sglang` as `sglang/launch_server.py`, and
run as `python -m sglang.launch_server --port P [--stub-mode MODE]`.

Modes, told apart by what they do at temperature T > 0 unless another thing is said:
  samples              a fresh random output each time (what a good server does)
  greedy               the greedy output
  greedy-after-first   a random first token, then the greedy output (what stock DFLASH does without its kernel)
  fixed                one output for every prompt and temperature
  unstable             another output each time, at T=0 too
  dies                 ends its process (closes the connection, as a thread)
  refuses              HTTP 400
  hangs                /generate never answers, although /health does
  accepts-nothing      samples, and reports as many verify steps as tokens
  collapses            samples, with hardly any draft token accepted at T > 0
  collapses-together   the same, while several requests are under way
  dies-together        ends its process then
  says-nothing         samples, and reports no verify steps
  ignores-top_k, ignores-top_p, ignores-min_p
                       samples, whatever that parameter is
  drifts               another greedy output, from the third token on
  near-tie             the same; and that token and the old one come up alike when it is drawn
  compiles             takes `compile_s` for the first request with each set of parameters; all others wait for it
  no-head              /health and nothing else (the nodes of a multi-node server other than rank 0)
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GREEDY_FALLBACK = (
    "DFLASH non-greedy verification is unavailable on this build/device; falling back to greedy argmax verification."
)


class StubServer:
    """The HTTP server; `unavailable` /health requests are answered 503 first."""

    def __init__(
        self,
        mode="samples",
        port=0,
        unavailable=0,
        args=None,
        identity=None,
        log=lambda line: None,
        die=None,
        release=None,
        compile_s=1.0,
    ):
        self.mode = mode
        self.unavailable = unavailable
        self.args = args or {}
        self.identity = identity
        self.log = log
        self.die = die
        self.release = release or threading.Event()  # ends requests that hang
        self.requests = []
        self.compile_s = compile_s
        self.compiled = set()
        self.scheduler = threading.Lock()  # held while it compiles
        self.under_way = self.arrived = 0
        self.arrivals = threading.Condition()
        self.random = random.Random(1)
        self.lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                stub.get(self)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.post(self, body)

            def log_message(self, *args):
                pass

        ThreadingHTTPServer.daemon_threads = True
        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.http.server_address[1]

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.release.set()
        self.http.shutdown()
        self.http.server_close()

    def get(self, handler):
        if handler.path == "/health":
            with self.scheduler, self.lock:
                self.unavailable -= 1
                starting = self.unavailable >= 0
            self.answer(handler, 503 if starting else 200, {})
        elif handler.path == "/server_info" and self.mode != "no-head":
            patch = {"ddtree_patch": {"identity": self.identity}} if self.identity else {}
            self.answer(handler, 200, {"speculative_algorithm": "STUB", "internal_states": [patch], **self.args})
        elif handler.path == "/v1/models":
            self.answer(handler, 200, {"data": []})
        else:
            self.answer(handler, 404, {"error": "no such path"})

    def post(self, handler, body):
        self.requests.append((handler.path, body, dict(handler.headers)))
        if self.mode == "no-head":
            return self.answer(handler, 404, {"error": "node rank 0 answers"})
        if handler.path == "/tokenize":
            return self.answer(handler, 200, {"tokens": list(body["prompt"].encode())})
        if handler.path != "/generate":
            return self.answer(handler, 404, {"error": "no such path"})
        sampling = body["sampling_params"]
        narrow = {
            "top_k": sampling.get("top_k") == 1,
            "top_p": sampling.get("top_p", 1.0) <= 0.001,
            "min_p": sampling.get("min_p", 0.0) == 1.0,
            self.mode.removeprefix("ignores-"): False,
        }
        hot = sampling.get("temperature", 1.0) > 0 and not any(narrow.values())
        if self.mode == "compiles":
            self.compile(frozenset(sampling) if hot else None)
        together = hot and self.mode.endswith("-together") and self.meets_others()
        if self.mode == "hangs":
            self.release.wait(60)
        if body.get("return_logprob"):
            return self.answer(handler, 400, {"error": "no logprobs together with speculative decoding"})
        if (hot and self.mode == "dies") or (together and self.mode == "dies-together"):
            if self.die:
                self.die()
            return handler.connection.close()
        if hot and self.mode == "refuses":
            return self.answer(handler, 400, {"error": {"message": "temperature > 0 is not supported"}})
        prompts = body.get("input_ids") or body["text"]
        if isinstance(prompts, str) or not isinstance(prompts[0], list):
            return self.answer(handler, 200, self.generate(prompts, sampling, hot, together))
        return self.answer(handler, 200, [self.generate(prompt, sampling, hot) for prompt in prompts])

    def compile(self, parameters):
        """Holds up whoever else asks."""
        with self.scheduler:
            if parameters and parameters not in self.compiled:
                self.compiled.add(parameters)
                self.log(f"stub: compiling for {', '.join(sorted(parameters))}")
                time.sleep(self.compile_s)
                self.log("stub: compiled")

    def meets_others(self):
        """Whether another request is under way, or comes within half a second."""
        with self.arrivals:
            others, self.under_way = self.under_way, self.under_way + 1
            self.arrived += 1
            mine = self.arrived
            self.arrivals.notify_all()
            met = others > 0 or self.arrivals.wait_for(lambda: self.arrived > mine, 0.5)
            self.under_way -= 1
            return met

    def generate(self, prompt, sampling, hot, together=False):
        count = sampling["max_new_tokens"]
        seed = "fixed" if self.mode == "fixed" else repr(prompt)
        ids = [random.Random(f"{seed}{i}").randrange(4, 200) for i in range(count)]
        if self.mode in ("drifts", "near-tie"):
            if self.mode == "near-tie" and sampling.get("temperature") == 0.1:  # one token, behind a text and two more
                before = random.Random(f"{bytes(prompt[:-2]).decode()!r}2").randrange(4, 200)
                return self.finished([self.random.choice((before, 250))])
            ids[2:] = [250] * len(ids[2:])
        if hot and self.mode.startswith("greedy"):
            self.log(GREEDY_FALLBACK)
        with self.lock:
            if hot and self.mode == "greedy-after-first":
                ids[0] = self.random.randrange(4, 8)
            elif (hot and self.mode not in ("greedy", "fixed")) or self.mode == "unstable":
                ids = [
                    ids[0] if self.random.random() < 0.5 else self.random.randrange(4, 200),
                    *(self.random.randrange(4, 200) for _ in ids[1:]),
                ]
        collapsed = count - 2 if hot and (together or self.mode == "collapses") else count // 8
        steps = {"accepts-nothing": count - 1, "collapses": collapsed, "collapses-together": collapsed}.get(
            self.mode, count // 3
        )
        return self.finished(ids, None if self.mode == "says-nothing" else max(1, steps), not isinstance(prompt, list))

    def finished(self, ids, steps=None, text=False):
        """The answer that these tokens are; `steps`: verify steps."""
        meta = {"finish_reason": {"type": "length"}, "completion_tokens": len(ids)}
        return {
            **({"text": bytes(ids).decode("latin-1")} if text else {}),
            "output_ids": ids,
            "meta_info": meta | ({} if steps is None else {"spec_verify_ct": steps}),
        }

    def answer(self, handler, status, value):
        data = json.dumps(value).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


IDENTITY = None  # of the patch that this process runs; nodes of one server must agree on it


def join_nodes(count, rank, address, end):
    """Wait for the other nodes of a multi-node server, as the real one does: it serves when all are there, all of
    them end when one does, and here they also end when their patches differ."""
    host, port = address.split(":")
    mine = f"{IDENTITY}\n".encode()
    if rank == 0:
        listener = socket.create_server((host, int(port)))
        links = [listener.accept()[0] for _ in range(count - 1)]
        theirs = [link.makefile("rb").readline() for link in links]
        agreed = all(line == mine for line in theirs)
        for link in links:
            link.sendall(mine)
    else:
        while True:
            try:
                links = [socket.create_connection((host, int(port)))]
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        links[0].sendall(mine)
        agreed = links[0].makefile("rb").readline() == mine
    if not agreed:
        print("stub: the nodes run different patches", flush=True)
        end()
    for link in links:
        threading.Thread(target=lambda link=link: (link.recv(1), end()), daemon=True).start()


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model-path")
    parser.add_argument("--speculative-algorithm")
    for flag in ("--speculative-draft-model-path", "--attention-backend", "--speculative-ddtree-budget"):
        parser.add_argument(flag)  # on the lines of docs/services.md
    parser.add_argument("--stub-mode", default="samples")
    parser.add_argument("--stub-start-s", type=float, default=0.0, help="seconds before it listens")
    parser.add_argument("--stub-fail", action="store_true", help="exit before listening")
    parser.add_argument("--stub-fail-after-s", type=float, default=0.0, help="with --stub-fail: seconds before that")
    parser.add_argument("--stub-ready-file", help="listen only when this file is there")
    parser.add_argument("--stub-unavailable", type=int, default=0, help="so many times /health is answered 503")
    parser.add_argument("--stub-next-port", action="store_true", help="take the next port when this one is busy")
    parser.add_argument("--stub-compile-s", type=float, default=1.0)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--dist-init-addr")
    parser.add_argument("--stub-orphan", action="store_true", help="leave the scheduler behind when told to end")
    options = parser.parse_args()
    print(f"stub server, secret {'set' if os.environ.get('STUB_SECRET') else 'not set'}", flush=True)
    if options.stub_fail:
        time.sleep(options.stub_fail_after_s)
        print("stub: no kernel image is available for execution on the device", flush=True)
        sys.exit(1)
    # Like SGLang's scheduler: a child that does not end with its parent.
    scheduler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # stub scheduler"])

    def end(number=None, frame=None):
        if not options.stub_orphan:
            scheduler.terminate()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)

    def die():
        print("stub: Scheduler hit an exception: CUDA error", flush=True)
        os._exit(1)

    time.sleep(options.stub_start_s)
    while options.stub_ready_file and not os.path.exists(options.stub_ready_file):
        time.sleep(0.02)
    if options.nnodes > 1:
        join_nodes(options.nnodes, options.node_rank, options.dist_init_addr, end)
        if options.node_rank > 0:
            options.stub_mode = "no-head"
    args = {
        "speculative_algorithm": options.speculative_algorithm,
        "cwd": os.getcwd(),
        "secret_is_set": bool(os.environ.get("STUB_SECRET")),
    }
    try:
        server = StubServer(
            options.stub_mode,
            options.port,
            args=args,
            log=lambda line: print(line, flush=True),
            die=die,
            unavailable=options.stub_unavailable,
            compile_s=options.stub_compile_s,
        )
    except OSError:
        if not options.stub_next_port:
            raise
        server = StubServer(options.stub_mode, 0, args=args)
    print(f"stub: listening on {server.port}", flush=True)
    server.http.serve_forever()


if __name__ == "__main__":
    main()
