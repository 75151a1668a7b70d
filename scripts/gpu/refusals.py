"""Unsupported combinations: a server that must not start says why in one sentence and ends, a request that cannot be
served is a 400 that names what it is, and those that are served beside it notice nothing."""

import http.client
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from scripts.gpu.asking import prompts
from scripts.gpu.fleet import PAIR, Run, tree
from scripts.gpu.server import generate

SERVERS = ("tree",)
# Arguments added to a DDTREE server's, and what its refusal says.
START_UP = {
    "page size": (["--page-size", "16"], "--page-size 1"),
    "flashinfer": (["--attention-backend", "flashinfer"], "--attention-backend triton"),
    "fa3": (["--attention-backend", "fa3"], "--attention-backend triton"),
    "decode backend": (["--decode-attention-backend", "flashinfer"], "--attention-backend triton"),
    "DP attention": (["--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"], "DP attention"),
    "pipeline": (["--pp-size", "2"], "pipeline"),
    "disaggregation": (["--disaggregation-mode", "decode"], "disaggregation"),
    "deterministic": (["--enable-deterministic-inference"], "deterministic"),
    "budget": (["--speculative-ddtree-budget", "0"], "--speculative-ddtree-budget"),
    "topk": (["--speculative-ddtree-topk", "0"], "--speculative-ddtree-topk"),
    "draft tokens": (["--speculative-num-draft-tokens", "8"], "--speculative-num-draft-tokens"),
}
# What a tree cannot serve exactly; the key is a word of its refusal.
REQUESTS = {
    "return_logprob": {"return_logprob": True},
    "grammar": {"sampling_params": {"json_schema": "{}"}},
    "frequency_penalty": {"sampling_params": {"frequency_penalty": 0.5}},
    "presence_penalty": {"sampling_params": {"presence_penalty": 0.5}},
    "repetition_penalty": {"sampling_params": {"repetition_penalty": 1.2}},
    "min_new_tokens": {"sampling_params": {"min_new_tokens": 2}},
    "sampling_seed": {"sampling_params": {"sampling_seed": 3}},
    "custom logit processor": {"custom_logit_processor": "{}"},
}


def run(run: Run) -> dict:
    return run.steps("refusals", {}, {"requests": lambda: _requests(run), "start-up": lambda: _start_up(run)})


def _start_up(run: Run) -> list[dict]:
    def one(name: str) -> dict:
        args, sentence = START_UP[name]
        own = f"refused: {name}".replace(" ", "-").replace(":", "")
        began = time.monotonic()
        server = run.start(own, run.python("patched"), PAIR / "target", [*run.small, *tree(32, 8), *args])
        try:
            code = server.process.wait(run.count(200, 400))
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - began
        run.stop(own)
        lines = [line.strip() for line in server.log.read_text(errors="replace").split("\n") if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith("ValueError: ") and sentence in line), None)
        return {
            "combination": name,
            "args": args,
            "exit": code,
            "seconds": seconds,
            "said": said.removeprefix("ValueError: ") if said else "\n".join(lines[-5:]),
            "passed": said is not None and code not in (0, None),
        }

    with ThreadPoolExecutor(run.count(len(START_UP), 2)) as pool:
        return list(pool.map(one, START_UP))


def _requests(run: Run) -> list[dict]:
    port = run.ports("tree")["tree"][0]
    asked = prompts(4)
    greedy = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    alone = [a["output_ids"] for a in generate(port, asked, greedy)]

    def ask(name: str) -> dict:
        params = {"temperature": 1.0, "max_new_tokens": 4} | REQUESTS[name].get("sampling_params", {})
        body = {"input_ids": asked[0], **REQUESTS[name], "sampling_params": params}
        status, answer = _post(port, body)
        return {"request": name, "status": status, "said": _message(answer), "passed": status == 400 and name in answer}

    with ThreadPoolExecutor(len(REQUESTS) + 1) as pool:
        beside = pool.submit(generate, port, asked, greedy)
        rows = list(pool.map(ask, REQUESTS))
        texts = [a["output_ids"] for a in beside.result()]
    after = [a["output_ids"] for a in generate(port, asked, greedy)]
    same = {"beside": texts == alone, "afterwards": after == alone}
    return [
        *rows,
        {
            "request": "four greedy requests beside them, and again",
            "status": 200,
            "said": json.dumps(same),
            "passed": all(len(text) == 64 for text in texts + after),
        },
    ]


def _post(port: int, body: dict) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def _message(answer: str) -> str:
    try:
        return json.loads(answer)["error"]["message"]
    except (ValueError, KeyError, TypeError):  # whatever it is, it is shown
        return answer[:300]
