"""Try a running server: does it sample, exactly when it is told to, and as fast as its draft allows?

The failure that this exists for answers HTTP 200: a server that decodes greedily at every temperature. Even such a
server samples the first token of each request (that one comes from the ordinary sampler), so outputs are compared
behind an equal first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from patcher.server.client import Generation, ServerProblem, SglangClient
from patcher.server.services.base import Service
from patcher.smoke import checks
from patcher.smoke.baseline import Baseline, ask
from patcher.smoke.divergence import examine
from patcher.smoke.result import Check, Measured, SmokeResult, TemperatureRow
from patcher.smoke.suite import SAMPLING_PATHS, Prompt, Suite

CHECKS = (
    "answers",
    "greedy_repeatable",
    "greedy_as_before",
    "prompts_differ",
    "top_k_1_is_greedy",
    "top_p_0_is_greedy",
    "min_p_1_is_greedy",
    "sampling_paths",
    "diverse",
    "acceptance",
    "throughput",
    "no_greedy_fallback_logged",
    "healthy_after",
    "new_process",
    "patch_identity",
)
# Each parameter at the value that leaves the likeliest token alone, at any temperature.
NARROWEST: dict[str, dict[str, float]] = {
    "top_k_1_is_greedy": {"top_k": 1},
    "top_p_0_is_greedy": {"top_p": 1e-3},
    "min_p_1_is_greedy": {"min_p": 1.0},
}


def run_suite(
    client: SglangClient,
    suite: Suite,
    *,
    baseline: Baseline | None = None,
    service: Service | None = None,
    started_after: float | None = None,
    log_marker: Mapping[str, Any] | None = None,
    identity: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> SmokeResult:
    """Run every check of the suite; what a server does wrong is in the result and is not raised.

    `baseline`: of record_baseline. `service`: for the log and the process; `log_marker`: where this server's log
    begins; `started_after`: unix time on the host that its process must be younger than. `identity`: the patch that
    it must report. Raises HostUnreachable when the connection to the host is lost.
    """
    run = _Run(client, suite, progress)
    before = service.live() if service else None
    for stage in (
        lambda: run.greedy(baseline),
        run.sampling_paths,
        *(lambda t=t: run.sampled(t) for t in suite.temperatures[1:]),
    ):
        if run.broken:
            break
        stage()
    run.judge()
    run.ask_server(identity)
    run.add(checks.no_greedy_fallback_logged(service, log_marker))
    if service:
        run.add(checks.new_process(before, service.live(), started_after))
    else:
        run.skip("new_process", "no service is configured")
    return run.result()


class _Run:
    """The requests of one run and what became of them; a request that fails ends the asking."""

    def __init__(self, client: SglangClient, suite: Suite, progress: Callable[[str], None]) -> None:
        self.client = client
        self.suite = suite
        self.progress = progress
        self.checks: dict[str, Check] = {}
        self.greedy_first: Generation | None = None
        self.single: dict[float, Measured] = {}
        self.batch: dict[float, Measured] = {}
        self.requests = 0

    @property
    def broken(self) -> bool:
        return "answers" in self.checks

    def add(self, check: Check) -> None:
        self.checks[check.name] = check

    def skip(self, name: str, why: str) -> None:
        self.add(Check(name, True, why, skipped=True))

    def ask(self, prompt: Prompt, **sampling: Any) -> Generation:
        self.requests += 1
        return ask(self.client, self.suite, prompt, sampling)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Requests that belong together; a failing one ends the phase and fails the check `answers`."""
        self.progress(text)
        try:
            yield
        except ServerProblem as problem:
            self.add(Check("answers", False, f"while {text}: {problem.what}", {"requests": self.requests}))

    def greedy(self, baseline: Baseline | None) -> None:
        prompts = self.suite.prompts
        with self.phase("decoding greedily"):
            begun = time.monotonic()
            answers = [self.ask(prompt, temperature=0.0) for prompt in prompts]
            self.single[0.0] = Measured(answers, time.monotonic() - begun)
            self.greedy_first = answers[0]
            outputs = {prompt.name: answer.output for prompt, answer in zip(prompts, answers, strict=True)}
            distinct = len(set(outputs.values()))
            self.add(
                Check(
                    "prompts_differ",
                    distinct == len(prompts),
                    f"{distinct} different outputs for {len(prompts)} prompts",
                    {"distinct": distinct},
                )
            )
            again = {prompt.name: self.ask(prompt, temperature=0.0).output for prompt in prompts}
            self.compare("greedy_repeatable", outputs, again)
            first = prompts[0]
            used = {parameter for path in self.suite.paths for parameter in SAMPLING_PATHS[path]}
            for name, parameter in NARROWEST.items():
                if not parameter.keys() <= used | {"top_k"}:  # a server that refuses to sample takes top_k = 1 alone
                    self.skip(name, "not among the suite's sampling paths")
                    continue
                narrow = self.ask(first, temperature=1.0, **parameter).output
                self.compare(name, {first.name: outputs[first.name]}, {first.name: narrow})
            if baseline is None:
                self.skip("greedy_as_before", "no outputs were recorded before the patch")
            elif baseline.fingerprint != self.suite.fingerprint:
                self.skip("greedy_as_before", f"the recorded outputs are of another suite ({baseline.suite})")
            else:
                recorded = {name: told.ids or told.text or "" for name, told in baseline.outputs.items()}
                self.compare("greedy_as_before", recorded, outputs)

    def compare(self, name: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """A check that outputs are equal, but for near-ties, which rounding may decide either way."""
        differing = {}
        for prompt in self.suite.prompts:
            if prompt.name in expected:
                parted = examine(self.client, prompt, expected[prompt.name], found[prompt.name], self.suite.timeout)
                if parted:
                    differing[prompt.name] = parted
        detail = "; ".join(f"{key}: {parted}" for key, parted in differing.items())
        self.add(
            Check(
                name,
                all(parted.near_tie for parted in differing.values()),
                detail or f"{len(expected)} of {len(expected)} outputs equal",
                {"compared": len(expected), "differing": {key: p.index for key, p in differing.items()}},
            )
        )

    def sampling_paths(self) -> None:
        with self.phase("trying each sampling path"):
            for path in self.suite.paths:
                self.ask(self.suite.prompts[0], temperature=1.0, **SAMPLING_PATHS[path])
            self.add(Check("sampling_paths", True, ", ".join(self.suite.paths), {"paths": list(self.suite.paths)}))

    def sampled(self, temperature: float) -> None:
        prompts = self.suite.prompts
        with self.phase(f"sampling at T={temperature:g}"):
            begun = time.monotonic()
            answers = [self.ask(prompt, temperature=temperature) for prompt in prompts]
            self.single[temperature] = Measured(answers, time.monotonic() - begun)
            begun = time.monotonic()
            with ThreadPoolExecutor(self.suite.concurrency) as pool:
                asked = [
                    pool.submit(ask, self.client, self.suite, prompts[0], {"temperature": temperature})
                    for _ in range(self.suite.samples)
                ]
                answers = [answer.result() for answer in asked]
            self.requests += len(answers)
            self.batch[temperature] = Measured(answers, time.monotonic() - begun)

    def judge(self) -> None:
        """The checks that follow from the answers, as far as there are any."""
        if self.suite.temperatures[-1] in self.batch:
            self.add(checks.diverse(self.batch))
        if self.single:
            self.add(checks.throughput(self.rows()))

    def ask_server(self, identity: str | None) -> None:
        """The checks that the server's state after all the requests decides."""
        try:
            self.client.health()
            self.add(Check("healthy_after", True, "/health answers 200"))
            info = self.client.server_info()
        except ServerProblem as problem:
            self.add(Check("healthy_after", False, problem.what))
            return
        if not self.broken:
            self.add(checks.acceptance(self.rows(), info.algorithm, self.suite.min_acceptance_ratio))
        if identity is None:
            self.skip("patch_identity", "no patch is expected")
        else:
            self.add(checks.patch_identity(info, identity))

    def rows(self) -> list[TemperatureRow]:
        alone = Measured([self.greedy_first], 0.0) if self.greedy_first else None
        return [
            TemperatureRow.of(temperature, single, self.batch.get(temperature), self.single[0.0], alone)
            for temperature, single in self.single.items()
        ]

    def result(self) -> SmokeResult:
        if not self.broken:
            self.add(
                Check("answers", True, f"{self.requests} requests answered and finished", {"requests": self.requests})
            )
        for name in CHECKS:
            if name not in self.checks:
                self.skip(name, "not reached, since a request failed")
        return SmokeResult(self.suite.name, tuple(self.checks[name] for name in CHECKS), tuple(self.rows()))
