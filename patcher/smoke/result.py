"""What a smoke run found, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from patcher.errors import SmokeFailed
from patcher.server.client import Generation


@dataclass(frozen=True)
class Check:
    """One check. A skipped one has not failed, and gives no assurance: `detail` says why."""

    name: str
    passed: bool
    detail: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    skipped: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "figures": dict(self.figures)}


@dataclass(frozen=True)
class Measured:
    """Answers and the seconds that they took together."""

    answers: Sequence[Generation]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def acceptance(self) -> float | None:
        """Tokens for each verify step, as the server's own `spec_accept_length`; None when the answers do not say.

        Of the fields, only the count of verify steps is in every release. An answer of one token has none.
        """
        steps, tokens = self._verified()
        return tokens / steps if steps else None

    @property
    def accepts_nothing(self) -> bool:
        """Whether every verify step gave just the one token that needs no draft (an acceptance of exactly 1.0).

        An answer's first token comes without a verify step, so `tokens / steps` is a little above 1 even then.
        """
        steps, tokens = self._verified()
        return steps > 0 and tokens - sum(1 for answer in self.answers if _steps(answer)) <= steps

    def _verified(self) -> tuple[int, int]:
        """(verify steps, tokens) of the answers that had any."""
        verified = [(_steps(answer), answer.tokens) for answer in self.answers if _steps(answer)]
        return sum(steps for steps, _ in verified), sum(tokens for _, tokens in verified)


@dataclass(frozen=True)
class TemperatureRow:
    """A line of the table. `ratio`: acceptance as a share of that at T=0; `batch_*`: of the concurrent requests."""

    temperature: float
    requests: int
    tokens: int
    tokens_per_second: float
    acceptance: float | None
    ratio: float | None
    batch_acceptance: float | None
    batch_ratio: float | None
    batch_tokens_per_second: float | None
    distinct: int | None
    accepts_nothing: bool

    @classmethod
    def of(
        cls,
        temperature: float,
        single: Measured,
        batch: Measured | None,
        greedy: Measured,
        greedy_alone: Measured | None,
    ) -> TemperatureRow:
        """`single`: each prompt once, one at a time; `batch`: the first prompt, concurrently; `greedy`,
        `greedy_alone`: the same two sets of prompts at T=0."""
        return cls(
            temperature=temperature,
            requests=len(single.answers) + (len(batch.answers) if batch else 0),
            tokens=single.tokens + (batch.tokens if batch else 0),
            tokens_per_second=single.tokens / single.seconds if single.seconds else 0.0,
            acceptance=single.acceptance,
            ratio=_ratio(single, greedy) if single is not greedy else None,
            batch_acceptance=batch.acceptance if batch else None,
            batch_ratio=_ratio(batch, greedy_alone) if batch and greedy_alone else None,
            batch_tokens_per_second=batch.tokens / batch.seconds if batch and batch.seconds else None,
            distinct=len({answer.output for answer in batch.answers}) if batch else None,
            accepts_nothing=single.accepts_nothing or (batch is not None and batch.accepts_nothing),
        )

    def as_dict(self) -> dict[str, Any]:
        """The row for a table and for JSON: rounded, without the columns that have no value."""
        values = {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(self).items()}
        return {key: value for key, value in values.items() if value is not None and key != "accepts_nothing"}


@dataclass(frozen=True)
class SmokeResult:
    suite: str
    checks: tuple[Check, ...]
    rows: tuple[TemperatureRow, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)

    def as_dict(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "passed": self.passed,
            "checks": [check.as_dict() for check in self.checks],
            "temperatures": [row.as_dict() for row in self.rows],
        }

    def raise_if_failed(self, where: str = "") -> None:
        """Raise SmokeFailed, which names every check that failed."""
        if not self.passed:
            raise SmokeFailed(
                "the smoke suite failed: " + ", ".join(check.name for check in self.failed),
                where=where,
                next_step="see the failed checks and the server's log",
                detail="\n".join(f"{check.name}: {check.detail}" for check in self.failed),
            )


def _steps(answer: Generation) -> int:
    return answer.meta.spec_verify_ct or 0


def _ratio(part: Measured, whole: Measured) -> float | None:
    a, b = part.acceptance, whole.acceptance
    return a / b if a is not None and b else None
