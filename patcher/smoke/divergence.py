"""Where two greedy outputs part, and whether the two tokens there were so close that rounding decides between them.

Another kernel, batch size or verify width rounds differently in 16 bits, so two correct servers may part at a near-tie
and nowhere else. The server is asked: for log-probabilities, and where it refuses them together with speculative
decoding (as SGLang 0.5.11 does), by drawing that one token often at a low temperature. The first token of a request
comes from the ordinary sampler, so this needs nothing of what is being tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from patcher.server.client import Generation, HttpStatus, ServerBroke, ServerProblem, SglangClient
from patcher.smoke.suite import Prompt

# bf16 logits near 20 are 1/8 apart; two roundings.
NEAR_TIE_NATS = 0.25
# At this temperature a token 0.25 nats behind still comes up 8 % of the time (missed by all 64 draws: 0.5 %), and one
# 1 nat behind 0.005 % of the time.
DRAW_TEMPERATURE = 0.1
DRAWS = 64


@dataclass(frozen=True)
class Divergence:
    """`index`: the first token (character, without ids) that differs. `near_tie` None: it could not be found out."""

    index: int
    near_tie: bool | None
    how: str

    def __str__(self) -> str:
        verdict = {True: "a near-tie", False: "not a near-tie", None: "near-tie or not is unknown"}[self.near_tie]
        return f"first difference at {self.index}, {verdict} ({self.how})"


def first_difference(a: Sequence[int] | str, b: Sequence[int] | str) -> int | None:
    """The index of the first element that differs, the length of the shorter when one goes on; None when equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def examine(
    client: SglangClient, prompt: Prompt, a: Sequence[int] | str, b: Sequence[int] | str, timeout: float
) -> Divergence | None:
    """How two outputs of one prompt part; None when they are equal. Raises ServerProblem when the server fails."""
    index = first_difference(a, b)
    if index is None:
        return None
    if isinstance(a, str) or isinstance(b, str):
        return Divergence(index, None, "the server sends no token ids")
    if index == min(len(a), len(b)):
        return Divergence(index, None, "one of the two ends there")
    ids = prompt.input_ids or client.tokenize(prompt.text)
    if not ids:
        return Divergence(index, None, "the server does not tokenize")
    prefix = [*ids, *a[:index]]
    gap = _gap_by_logprobs(client, prefix, a[index], b[index], timeout)
    if gap is not None:
        return Divergence(index, gap <= NEAR_TIE_NATS, f"{gap:.3f} nats apart")
    seen = _draw(client, prefix, timeout)
    counts = f"drawn {seen.count(a[index])} and {seen.count(b[index])} times of {len(seen)} at T={DRAW_TEMPERATURE}"
    return Divergence(index, a[index] in seen and b[index] in seen, counts)


def _gap_by_logprobs(client: SglangClient, prefix: list[int], a: int, b: int, timeout: float) -> float | None:
    """Nats between two next tokens; None when the server gives no log-probabilities, or not those two."""
    payload = {
        "input_ids": prefix,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": 20,
    }
    try:
        answer = client.generate(payload, timeout=timeout)
    except HttpStatus as status:
        if status.status >= 500:
            raise
        return None
    try:
        found = {
            int(token): float(logprob) for logprob, token, *_ in (answer.meta.output_top_logprobs or [[]])[0] or []
        }
    except (ValueError, TypeError, LookupError) as error:
        raise ServerBroke(
            f"the log-probabilities make no sense: {error}", where=client.where, next_step="see the server's log"
        ) from error
    return abs(found[a] - found[b]) if a in found and b in found else None


def _draw(client: SglangClient, prefix: list[int], timeout: float) -> list[int]:
    payload = {"input_ids": [prefix] * DRAWS, "sampling_params": {"temperature": DRAW_TEMPERATURE, "max_new_tokens": 1}}
    answers: Sequence[Generation] = client.generate_batch(payload, timeout=timeout)
    if not all(answer.ids for answer in answers):
        raise ServerProblem("a one-token answer has no token", where=client.where, next_step="see the server's log")
    return [answer.ids[0] for answer in answers]
