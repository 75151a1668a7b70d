"""What DDTREE must answer, asked of servers that have no tree: plain decoding, and stock DFLASH."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from exact import target_row
from serving import PROMPTS, Server, token_ids

VOCABULARY = 320
TOKENS = 48
CONTEXT = 1024  # of the servers
DRAWS = 300  # requests for each kind of sampling
LENGTH = 3  # tokens of each: the first from the prefill, the others from verify steps
SAMPLED_PROMPT = PROMPTS[3]  # "(" is nearly sure to follow, and nothing is sure after it
KINDS = {
    "T=1": {"temperature": 1.0},
    "T=0.6": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 4},
    "top_k and top_p": {"temperature": 1.3, "top_k": 20, "top_p": 0.4},
    "min_p": {"temperature": 1.0, "min_p": 0.5},
}
# Which prefixes are followed further; fewer draws than this of one outcome say nothing.
LEAST = 5 / DRAWS
SOURCE = Path(argparse.__file__).read_bytes()
LONG_PROMPTS = [SOURCE[5000 + 900 * i : 5100 + 909 * i] for i in range(16)]
LONG_TOKENS = 160
# (prompt tokens, tokens to generate) that end exactly at the context's length; SGLang stops two tokens before it,
# and takes no prompt that comes nearer than the last.
AT_THE_LIMIT = [(1000, 24), (1011, 13), (1017, 7)]
LAST_TOKEN = CONTEXT - 2
STOPS = [
    {"stop": ["self"]},
    {"stop": ["\n    "]},
    {"stop_token_ids": [ord(" ") + 4]},
    {"stop_token_ids": [ord("e") + 4, ord("(") + 4], "stop": ["zz"]},
    {"logit_bias": {"2": 12.0}},  # the end of the text becomes likely, but not at once
    {"logit_bias": {str(ord("e") + 4): -100.0}, "ignore_eos": True},
]


@dataclass(frozen=True)
class Reference:
    """Attributes:
    plain: answers to PROMPTS, greedy.
    long: output ids for LONG_PROMPTS.
    limit: (status, output ids) for AT_THE_LIMIT.
    stopped: {(prompt number, stop number): (output ids, finish reason)}.
    sampled: {kind: {tokens: probability}}: what LENGTH tokens after SAMPLED_PROMPT must be. Prefixes less likely than
        LEAST are outcomes themselves: all their continuations together.
    """

    plain: list[dict]
    long: list[list[int]]
    limit: list[tuple[int, list[int]]]
    stopped: dict[tuple[int, int], tuple[list[int], dict]]
    sampled: dict[str, dict[tuple[int, ...], float]]


@dataclass(frozen=True)
class Stock:
    """Attributes:
    greedy: answers to PROMPTS.
    sampled: output ids for SAMPLED_PROMPT at temperature 1, some times.
    """

    greedy: list[dict]
    sampled: list[list[int]]


def ask_stock(dflash: Server) -> Stock:
    sampling = {"temperature": 1, "max_new_tokens": TOKENS, "ignore_eos": True}
    return Stock(
        greedy=[dflash.greedy(prompt, TOKENS) for prompt in PROMPTS],
        sampled=[dflash.generate(SAMPLED_PROMPT, **sampling)["output_ids"] for _ in range(4)],
    )


def collect(plain: Server) -> Reference:
    rows = Rows(plain)
    return Reference(
        plain=[plain.greedy(prompt, TOKENS) for prompt in PROMPTS],
        long=ask_long(plain, clients=16),
        limit=[ask_at_the_limit(plain, *case) for case in AT_THE_LIMIT],
        stopped=ask_stops(plain),
        sampled={kind: rows.outcomes(token_ids(SAMPLED_PROMPT), one) for kind, one in KINDS.items()},
    )


def ask_long(server: Server, clients: int) -> list[list[int]]:
    sampling = {"temperature": 0, "max_new_tokens": LONG_TOKENS, "ignore_eos": True}
    return [a["output_ids"] for a in server.together(LONG_PROMPTS, [sampling] * len(LONG_PROMPTS), clients)]


def ask_at_the_limit(server: Server, prompt_tokens: int, new_tokens: int) -> tuple[int, list[int]]:
    ids = token_ids(SOURCE[: prompt_tokens - 1])
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    status, answer = server.ask({"input_ids": ids, "sampling_params": sampling})
    return status, answer.get("output_ids", [])


def ask_stops(server: Server) -> dict[tuple[int, int], tuple[list[int], dict]]:
    found = {}
    for number in (0, 2, 11):
        for stop, one in enumerate(STOPS):
            answer = server.generate(PROMPTS[number], temperature=0, max_new_tokens=40, **one)
            found[number, stop] = answer["output_ids"], answer["meta_info"]["finish_reason"]
    return found


class Rows:
    """The target's own distribution after any context, from the log-probabilities that a plain server reports."""

    def __init__(self, server: Server):
        self.server = server
        self.known: dict[tuple[int, ...], list[float]] = {}

    def after(self, context: tuple[int, ...]) -> list[float]:
        """Log-probability of each token id at temperature 1."""
        if context not in self.known:
            status, answer = self.server.ask(
                {
                    "input_ids": list(context),
                    "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
                    "return_logprob": True,
                    "top_logprobs_num": VOCABULARY,
                }
            )
            assert status == 200, answer
            row = [-math.inf] * VOCABULARY
            for logprob, token, _ in answer["meta_info"]["output_top_logprobs"][0]:
                row[token] = logprob
            self.known[context] = row
        return self.known[context]

    def outcomes(self, prompt: list[int], sampling: dict) -> dict[tuple[int, ...], float]:
        """See Reference.sampled."""
        found, growing = {}, {(): 1.0}
        for _ in range(LENGTH):
            longer = {}
            for prefix, probability in growing.items():
                row, margin = target_row(self.after((*prompt, *prefix)), **sampling)
                assert margin > 1e-5, f"rounding may decide what {sampling} keeps after {prefix}: take another prompt"
                longer |= {(*prefix, token): probability * p for token, p in enumerate(row) if p > 0}
            found |= {prefix: p for prefix, p in longer.items() if p < LEAST}
            growing = {prefix: p for prefix, p in longer.items() if p >= LEAST}
        return found | growing
