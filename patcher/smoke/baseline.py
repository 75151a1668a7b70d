"""The greedy outputs of a server from before the patch, to be compared with after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from patcher.server.client import Generation, ServerBroke, SglangClient
from patcher.smoke.suite import Prompt, Suite
from patcher.typed import Frozen


class Output(Frozen):
    ids: tuple[int, ...]
    text: str | None


class Baseline(Frozen):
    """The greedy outputs of a suite's prompts, by the prompts' names."""

    suite: str
    fingerprint: str
    outputs: dict[str, Output]


def record_baseline(
    client: SglangClient, suite: Suite, progress: Callable[[str], None] = lambda text: None
) -> Baseline:
    """The greedy outputs of a suite's prompts, to be compared with after the patch. Raises ServerProblem."""
    outputs = {}
    for prompt in suite.prompts:
        progress(f"recording greedy output: {prompt.name}")
        answer = ask(client, suite, prompt, {"temperature": 0.0})
        outputs[prompt.name] = Output(ids=answer.ids, text=answer.text)
    return Baseline(suite=suite.name, fingerprint=suite.fingerprint, outputs=outputs)


def ask(client: SglangClient, suite: Suite, prompt: Prompt, sampling: Mapping[str, Any]) -> Generation:
    """One finished generation with at least one token; raises ServerProblem for anything else."""
    payload = {**prompt.payload(), "sampling_params": {"max_new_tokens": suite.max_new_tokens, **sampling}}
    answer = client.generate(payload, timeout=suite.timeout)
    if answer.finish not in ("length", "stop") or answer.tokens == 0:
        raise ServerBroke(
            f"prompt {prompt.name} at {sampling} did not finish: {answer.meta.finish_reason}, {answer.tokens} tokens",
            where=client.where,
            next_step="see the server's log",
        )
    return answer
