"""A smoke suite: the prompts, temperatures and limits that a server is tried with. Read from a TOML file, strictly."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from patcher.errors import UsageProblem
from patcher.shipped import shipped
from patcher.typed import Misfit, Settings, typed

SUITES = shipped("configs") / "smoke"
DEFAULT_SUITE = "default"

# Every sampling path of a server, by the parameters that lead to it. The first request of each may compile kernels.
SAMPLING_PATHS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.95},
    "top_k_top_p": {"top_k": 20, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
}


class Prompt(Settings, frozen=True):
    """Either `text` or `input_ids`: servers without tokenizer take ids only."""

    name: str
    text: str = ""
    input_ids: tuple[int, ...] = ()

    def payload(self) -> dict[str, Any]:
        """The prompt's part of a /generate request."""
        return {"input_ids": list(self.input_ids)} if self.input_ids else {"text": self.text}


class Suite(Settings, frozen=True):
    """`temperatures` begin with 0; the highest one must give diverse outputs.

    `samples`: how often one prompt is asked at each temperature above 0. `concurrency`: requests at a time there.
    `paths`: keys of SAMPLING_PATHS. `timeout`: seconds for one request. `min_acceptance_ratio`: the lowest acceptance
    length, as a share of the one at temperature 0, that passes.
    """

    name: str
    prompts: tuple[Prompt, ...]
    temperatures: Annotated[tuple[Annotated[float, Meta(ge=0)], ...], Meta(min_length=1)] = (0.0, 0.6, 1.0)
    # 16 samples of 8 tokens are rarely equal by chance; fewer would blame a server that samples.
    max_new_tokens: Annotated[int, Meta(ge=8)] = 64
    samples: Annotated[int, Meta(ge=4)] = 16
    concurrency: Annotated[int, Meta(ge=1)] = 4
    timeout: Annotated[float, Meta(ge=1)] = 300.0
    paths: Annotated[tuple[str, ...], Meta(min_length=1)] = tuple(SAMPLING_PATHS)
    min_acceptance_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.25

    @property
    def fingerprint(self) -> str:
        """Equal for two suites whose greedy outputs can be compared."""
        asked = [[prompt.name, prompt.payload()] for prompt in self.prompts]
        return hashlib.sha256(json.dumps([self.max_new_tokens, asked]).encode()).hexdigest()


def load_suite(which: str = "") -> Suite:
    """A suite by the path of its file, or by its name in configs/smoke; empty: the default one.

    Raises UsageProblem for a file that is missing, not TOML, or has an unknown key or an impossible value.
    """
    path = Path(which) if which.endswith(".toml") else SUITES / f"{which or DEFAULT_SUITE}.toml"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in SUITES.glob("*.toml")))
        raise UsageProblem(
            f"cannot read the smoke suite: {error.strerror}",
            where=str(path),
            next_step=f"give a path that ends in .toml, or one of: {known}",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageProblem(f"not a TOML file: {error}", where=str(path), next_step="correct that place") from error
    return _suite(document, path)


def _suite(document: Mapping[str, Any], path: Path) -> Suite:
    try:
        suite = typed({"name": path.stem, "prompts": [], **document}, Suite)
    except Misfit as misfit:
        raise _refuse(path, ".".join(misfit.path), misfit.what) from misfit
    _check(suite, path)
    return suite


def _check(suite: Suite, path: Path) -> None:
    names = [prompt.name for prompt in suite.prompts]
    if len(set(names)) != len(names) or len(names) < 2:
        raise _refuse(path, "prompts", "at least two are needed, with different names: their outputs must differ")
    if suite.temperatures[0] != 0.0 or list(suite.temperatures) != sorted(set(suite.temperatures)):
        raise _refuse(path, "temperatures", "must rise, and begin with 0.0, which the others are compared with")
    if len(suite.temperatures) < 2:
        raise _refuse(path, "temperatures", "none is above 0: a server that only decodes greedily would pass")
    for name in suite.paths:
        if name not in SAMPLING_PATHS:
            raise _refuse(path, "paths", f"{name!r} is not one of {', '.join(SAMPLING_PATHS)}")
    for prompt in suite.prompts:
        if bool(prompt.text) == bool(prompt.input_ids):
            raise _refuse(path, f"prompts.{prompt.name}", "needs either text or input_ids")


def _refuse(path: Path, key: str, why: str) -> UsageProblem:
    return UsageProblem(f"{key}: {why}", where=str(path), next_step=f"correct {key} in {path}")
