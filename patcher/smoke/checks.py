"""The judgements of a smoke run that need no further request: measured answers in, a Check out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from patcher.server.client import ServerInfo
from patcher.server.services.base import CLOCK_SLACK_S, UNREADABLE, Service
from patcher.smoke.result import Check, Measured, TemperatureRow

# What stock SGLang logs, once for each process, when it verifies greedily although it was asked to sample.
GREEDY_FALLBACK = "falling back to greedy argmax verification"


def diverse(batches: Mapping[float, Measured]) -> Check:
    """Whether the samples of one prompt at the highest temperature differ behind an equal first token.

    `batches`: temperature -> the samples. Lower temperatures are reported; they may agree by right.
    """
    figures, told = {}, []
    for temperature, measured in batches.items():
        outputs = [answer.output for answer in measured.answers]
        distinct, behind = len(set(outputs)), distinct_after_equal_first(outputs)
        told.append(f"T={temperature:g}: {distinct} of {len(outputs)} different")
        figures[f"T={temperature:g}"] = {
            "samples": len(outputs),
            "distinct": distinct,
            "distinct_after_equal_first": behind,
        }
    if distinct == 1:
        told.append("all equal at the highest: the server decodes greedily")
    elif behind == 0:
        told.append("no two begin with the same token, which shows nothing: take another first prompt")
    elif behind == 1:
        told.append("all that begin with the same token are equal: only that first token is sampled")
    return Check("diverse", behind > 1, "; ".join(told), figures)


def distinct_after_equal_first(outputs: Sequence[Sequence[int] | str]) -> int:
    """How many different outputs the most diverse group has whose members begin alike; 0 when no two do.

    1 means that nothing behind the first element was ever different.
    """
    groups: dict[Any, list[Any]] = {}
    for output in outputs:
        groups.setdefault(output[:1], []).append(output)
    return max((len(set(group)) for group in groups.values() if len(group) > 1), default=0)


def acceptance(rows: Sequence[TemperatureRow], algorithm: str | None, least_ratio: float) -> Check:
    """Whether drafts are accepted at every temperature, and not far less often than at T=0.

    `algorithm`: the server's speculative algorithm, None when it has none or did not say.
    """
    rows = [row for row in rows if row.acceptance is not None]
    if not rows and algorithm:
        return Check("acceptance", False, f"the server runs {algorithm}, but its answers say nothing of acceptance")
    if not rows:
        return Check("acceptance", True, "the server does not speculate", skipped=True)
    told, passed = [], True
    for row in rows:
        told.append(f"T={row.temperature:g}: {row.acceptance:.2f}")
        for name, ratio in (("one at a time", row.ratio), ("concurrent", row.batch_ratio)):
            if ratio is not None:
                low = ratio < least_ratio
                passed = passed and not low
                told.append(f"{name} x{ratio:.2f}" + (f" (below x{least_ratio:g})" if low else ""))
        if row.accepts_nothing:
            passed = False
            told.append("exactly 1.0: no draft token was accepted")
    figures = {
        f"T={row.temperature:g}": {"length": row.acceptance, "ratio": row.ratio, "batch_ratio": row.batch_ratio}
        for row in rows
    }
    return Check("acceptance", passed, "; ".join(told), {"algorithm": algorithm, **figures})


def throughput(rows: Sequence[TemperatureRow]) -> Check:
    """The speed at each temperature; tells, and judges nothing: how fast is fast enough is not known here."""
    told = []
    for row in rows:
        concurrent = f" ({row.batch_tokens_per_second:.1f} concurrent)" if row.batch_tokens_per_second else ""
        told.append(f"T={row.temperature:g}: {row.tokens_per_second:.1f} tokens/s{concurrent}")
    return Check("throughput", True, "; ".join(told), {f"T={row.temperature:g}": row.tokens_per_second for row in rows})


def no_greedy_fallback_logged(service: Service | None, marker: Mapping[str, Any] | None) -> Check:
    """Whether the server's log is free of the line by which stock SGLang gives up sampling."""
    name = "no_greedy_fallback_logged"
    if service is None:
        return Check(name, True, "no service is configured whose log could be read", skipped=True)
    text = service.log_since(marker)
    if not text:
        return Check(name, True, "no log was found (service.log in hosts.toml names it)", skipped=True)
    if text.startswith(UNREADABLE):
        return Check(name, True, text.strip("[]"), skipped=True)
    lines = [line for line in text.split("\n") if GREEDY_FALLBACK in line]
    return Check(name, not lines, lines[0].strip() if lines else "the line is absent", {"lines": len(lines)})


def new_process(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, started_after: float | None
) -> Check:
    """Whether one process, younger than `started_after` (unix time on the host), served all along.

    `before`, `after`: Service.live() at the beginning and at the end.
    """
    name = "new_process"
    if after is None:
        return Check(name, False, "the server's process is gone")
    pid, started = after["pid"], after["start_time"]
    figures = {"pid": pid, "start_time": started}
    if before is None or (before["pid"], before["ticks"]) != (pid, after["ticks"]):
        return Check(name, False, f"the server was restarted meanwhile: process {pid} is new", figures)
    owner = after["listener"]["owner"]
    if owner not in ("server", "unseen"):
        return Check(name, False, f"the port is not held by the server's process {pid}", figures)
    seen = "holds the port" if owner == "server" else "runs (who holds the port was not seen)"
    told = f"process {pid} {seen}"
    if started_after is not None and started < started_after - CLOCK_SLACK_S:
        return Check(name, False, f"{told}, and is older than the patched files", figures)
    return Check(name, True, told, figures)


def patch_identity(info: ServerInfo, expected: str) -> Check:
    """Whether every scheduler reports the patch that is installed."""
    found = info.identities
    told = f"the server reports {', '.join(sorted(name or 'no patch' for name in found))}"
    return Check("patch_identity", found == {expected}, told if found == {expected} else f"{told}; expected {expected}")
