"""A long, mixed load on one server of the trained pair: clients that come and go, and what each of them must see.

Made for a process of its own (`run_load`): many clients of many servers would share one interpreter otherwise.
"""

import http.client
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from scripts.gpu.releases import retractions, verify_steps
from scripts.gpu.server import generate

NEWLINE = ord("\n") + 4
SAMPLING = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.0},
)
# How often each kind of client is drawn.
KINDS = {
    "greedy": 5,
    "sampled": 6,
    "stop": 2,
    "again": 3,
    "aborted": 2,
    "dropped": 2,
    "limit": 1,
    "beyond": 1,
    "many": 1,
}


@dataclass(frozen=True)
class Plan:
    """What to ask of a server.

    Attributes:
        port: of the server.
        context: its context length in tokens.
        prompts, texts: token ids, and plain decoding's greedy text after each.
        widths: clients at a time, one after the other; every one holds for `hold` seconds at least.
        request_steps: verify steps to reach, summed over requests; after the widths have been gone through, and no
            later than `deadline` seconds from the start.
    """

    port: int
    context: int
    prompts: list[list[int]]
    texts: list[list[int]]
    widths: tuple[int, ...]
    hold: float
    request_steps: int
    deadline: float
    seed: int


@dataclass
class Seen:
    """What clients saw. `wrong`: sentences about answers that must not be; `parted`: (prompt number, tokens of its own
    text in the prompt, index of the first other token) of greedy texts that are not plain decoding's."""

    asked: Counter = field(default_factory=Counter)
    request_steps: int = 0
    tokens: int = 0
    retractions: int = 0
    cached_hits: int = 0
    wrong: list[str] = field(default_factory=list)
    parted: set[tuple[int, int, int]] = field(default_factory=set)
    seconds: float = 0.0


def run_load(plan: Plan) -> Seen:
    """Put the load on the server; returns when all clients are done."""
    return _Load(plan).run()


class _Load:
    def __init__(self, plan: Plan):
        self.plan = plan
        self.seen = Seen()
        self.lock = threading.Lock()
        self.width = 0
        self.over = False

    def run(self) -> Seen:
        began = time.monotonic()
        clients = [threading.Thread(target=self._client, args=(n,)) for n in range(max(self.plan.widths))]
        for client in clients:
            client.start()
        end = began + self.plan.deadline
        number = 0
        while time.monotonic() < end:
            enough = self.seen.request_steps >= self.plan.request_steps
            if number >= len(self.plan.widths) and enough:
                break
            self.width = self.plan.widths[number % len(self.plan.widths)]
            number += 1
            time.sleep(self.plan.hold)
        self.over = True
        for client in clients:
            client.join()
        self.seen.seconds = time.monotonic() - began
        return self.seen

    def _client(self, number: int) -> None:
        rng = random.Random(self.plan.seed * 1000 + number)
        while not self.over:
            if number >= self.width:
                time.sleep(0.02)
                continue
            kind = rng.choices(list(KINDS), KINDS.values())[0]
            try:
                getattr(self, f"_{kind}")(rng)
            except Exception as error:  # whatever it was: the load goes on, and the run fails for it
                self._wrong(f"{kind}: {error!r}"[:500])
                time.sleep(0.5)
            with self.lock:
                self.seen.asked[kind] += 1

    # ---- kinds of clients --------------------------------------------------------------------------------------

    def _greedy(self, rng: random.Random) -> None:
        i = rng.randrange(len(self.plan.prompts))
        self._text(i, 0, rng.randrange(1, len(self.plan.texts[i])))

    def _again(self, rng: random.Random) -> None:
        """A prompt with the beginning of its own greedy text, which may be cached."""
        i = rng.randrange(len(self.plan.prompts))
        own = rng.randrange(1, len(self.plan.texts[i]) - 1)
        self._text(i, own, rng.randrange(1, len(self.plan.texts[i]) - own))

    def _text(self, i: int, own: int, tokens: int) -> None:
        prompt, text = self.plan.prompts[i] + self.plan.texts[i][:own], self.plan.texts[i][own : own + tokens]
        (answer,) = self._ask(prompt, {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True})
        found = answer["output_ids"]
        if len(found) != tokens:
            self._wrong(f"greedy: {len(found)} tokens for {tokens}")
        with self.lock:
            self.seen.cached_hits += answer["meta_info"]["cached_tokens"] > len(self.plan.prompts[i])
            if found != text:
                at = next(n for n, (a, b) in enumerate(zip(found, text, strict=False)) if a != b)
                self.seen.parted.add((i, own, at))

    def _sampled(self, rng: random.Random) -> None:
        tokens = rng.choice((1, 2, rng.randrange(3, 40), rng.randrange(40, 300)))
        params = rng.choice(SAMPLING) | {"max_new_tokens": tokens, "ignore_eos": True}
        (answer,) = self._ask(rng.choice(self.plan.prompts), params)
        if len(answer["output_ids"]) != tokens:
            self._wrong(f"sampled: {len(answer['output_ids'])} tokens for {tokens}")

    def _stop(self, rng: random.Random) -> None:
        """The first of the stop tokens ends the text, and nothing comes after it."""
        stops = rng.choice(([NEWLINE], [ord(" ") + 4, ord(")") + 4]))
        params = rng.choice(SAMPLING) | {"max_new_tokens": 200, "stop_token_ids": stops}
        (answer,) = self._ask(rng.choice(self.plan.prompts), params)
        reason, found = answer["meta_info"]["finish_reason"], answer["output_ids"]
        stopped = [n for n, token in enumerate(found) if token in stops]
        if reason["type"] == "stop" and reason["matched"] in stops and stopped != [len(found) - 1]:
            self._wrong(f"stop: {reason}, stop tokens at {stopped} of {len(found)}")
        if reason["type"] == "length" and (stopped or len(found) != 200):
            self._wrong(f"stop: {reason}, stop tokens at {stopped} of {len(found)}")

    def _limit(self, rng: random.Random) -> None:
        """To the very end of the context, which SGLang ends two tokens early."""
        length = self.plan.context - rng.randrange(7, 120)
        room = self.plan.context - length
        asked = rng.choice((room, None))
        params = rng.choice(SAMPLING) | {"max_new_tokens": asked, "ignore_eos": True}
        (answer,) = self._ask(self._of_length(rng, length), params)
        if len(answer["output_ids"]) != room - 2:
            self._wrong(f"limit: {len(answer['output_ids'])} tokens where {room - 2} had room")

    def _beyond(self, rng: random.Random) -> None:
        length, tokens = rng.choice(((self.plan.context - 10, 11), (self.plan.context, 1), (self.plan.context + 50, 1)))
        status, body = self._post(self._of_length(rng, length), {"temperature": 1.0, "max_new_tokens": tokens})
        if status != 400:
            self._wrong(f"beyond the context: {status}: {body[:200]!r}")

    def _many(self, rng: random.Random) -> None:
        """One HTTP request for several texts."""
        prompts = [rng.choice(self.plan.prompts) for _ in range(rng.randrange(2, 5))]
        params = [rng.choice(SAMPLING) | {"max_new_tokens": rng.randrange(1, 80), "ignore_eos": True} for _ in prompts]
        lengths = [len(answer["output_ids"]) for answer in self._ask(prompts, params)]
        if lengths != [p["max_new_tokens"] for p in params]:
            self._wrong(f"many: {lengths} tokens")

    def _aborted(self, rng: random.Random) -> None:
        rid = f"load-{self.plan.seed}-{rng.getrandbits(64):x}"
        with _Stream(self.plan.port, rng.choice(self.plan.prompts), rng.choice(SAMPLING), rid) as stream:
            stream.read_events(rng.randrange(1, 8))
            status, body = _post(self.plan.port, "/abort_request", {"rid": rid})
            last = stream.read_rest()
        if status != 200:
            self._wrong(f"abort: {status}: {body[:200]!r}")
        elif last["meta_info"]["finish_reason"]["type"] not in ("abort", "length"):
            self._wrong(f"abort: finished by {last['meta_info']['finish_reason']}")
        self._count(last)

    def _dropped(self, rng: random.Random) -> None:
        with _Stream(self.plan.port, rng.choice(self.plan.prompts), rng.choice(SAMPLING)) as stream:
            stream.read_events(rng.randrange(1, 8))

    # ---- asking ------------------------------------------------------------------------------------------------

    def _ask(self, input_ids: list, params: dict | list) -> list[dict]:
        answers = generate(self.plan.port, input_ids, params)
        for answer in answers:
            self._count(answer)
        return answers

    def _count(self, answer: dict) -> None:
        info = answer["meta_info"]
        with self.lock:
            self.seen.request_steps += verify_steps(info)
            self.seen.tokens += info["completion_tokens"]
            self.seen.retractions += retractions(info)

    def _post(self, input_ids: list, params: dict) -> tuple[int, bytes]:
        return _post(self.plan.port, "/generate", {"input_ids": input_ids, "sampling_params": params})

    def _of_length(self, rng: random.Random, length: int) -> list[int]:
        ids: list[int] = [1]
        while len(ids) < length:
            ids += rng.choice(self.plan.prompts)[1:]
        return ids[:length]

    def _wrong(self, sentence: str) -> None:
        with self.lock:
            self.seen.wrong.append(sentence)


class _Stream:
    """A streamed text of up to 400 tokens. Leaving the block hangs up."""

    def __init__(self, port: int, prompt: list[int], params: dict, rid: str | None = None):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        body = {"input_ids": prompt, "stream": True, "rid": rid}
        body["sampling_params"] = params | {"max_new_tokens": 400, "ignore_eos": True}
        self.connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        self.response = self.connection.getresponse()
        if self.response.status != 200:
            raise RuntimeError(f"stream: {self.response.status}: {self.response.read()[:300]!r}")

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_error: object) -> None:
        self.connection.close()

    def read_events(self, count: int) -> None:
        for _ in range(2 * count):  # an event is a line and an empty one
            self.response.readline()

    def read_rest(self) -> dict:
        """The last event that is an answer."""
        lines = [line for line in self.response.read().split(b"\n") if line.startswith(b"data: {")]
        if not lines:
            raise RuntimeError("stream: it ended without a finish reason")
        return json.loads(lines[-1].removeprefix(b"data: "))


def _post(port: int, path: str, body: dict) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
