"""The kernel behind exact sampling: where each release has it, and what a probe of it on the host found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patcher.errors import KernelProblem
from patcher.series.model import GREEDY_STAGE, current_stage_name
from patcher.wire.shapes import ANY, COUNT, each, problem

PROBE = Path(__file__).parents[1] / "agent" / "kernel_probe.py"
PROBE_TIMEOUT_S = 550.0  # some releases build the op at its first call
SEED = 20

VERIFY = "tree_speculative_sampling_target_only"
# Role -> (module, name), by the first release that has it there.
OP_TABLE: tuple[tuple[tuple[int, ...], dict[str, tuple[str, str]]], ...] = (
    (
        (0, 5, 11),
        {
            "verify": ("sgl_kernel", VERIFY),
            "top_k": ("sgl_kernel", "top_k_renorm_prob"),
            "top_p": ("sgl_kernel", "top_p_renorm_prob"),
        },
    ),
    (
        (0, 5, 21),
        {
            "verify": ("sglang.kernels.ops.speculative.sampling", VERIFY),
            "top_k": ("flashinfer.sampling", "top_k_renorm_probs"),
            "top_p": ("flashinfer.sampling", "top_p_renorm_probs"),
        },
    ),
    (
        (0, 5, 23),
        {
            "verify": ("sglang.kernels.ops.speculative.verify_sampling", VERIFY),
            "top_k": ("sglang.kernels.ops.sampling.renorm", "top_k_renorm_prob"),
            "top_p": ("sglang.kernels.ops.sampling.renorm", "top_p_renorm_prob"),
        },
    ),
)

_TEXT = (str, None)
_VERSIONS = {"versions": each(str), "cuda": _TEXT, "driver": _TEXT, "gpus": [str]}
_REPORT = {
    **_VERSIONS,
    "imports": {"verify": {"path": str, "problem": _TEXT}},
    "renorm": (None, each(bool)),
    "trees": (None, {"trees": COUNT, "wrong": COUNT, "first_wrong": (None, each(ANY))}),
    "traps": (None, each({"as_known": bool, "found": ANY})),
    "sglang_available": (None, bool),
    "sglang_problem": _TEXT,
    "torch_problem": _TEXT,
    "problem": _TEXT,
}

# What T > 0 does without the op.
FOLLOW = "sample-and-follow"
GREEDY = "greedy decoding, silently"
REFUSED = "nothing: T > 0 is refused"


def ops_of(version: str) -> dict[str, tuple[str, str]]:
    """Where SGLang `version` has the ops; releases before the table's first are taken as that one."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    found = OP_TABLE[0][1]
    for first, ops in OP_TABLE:
        if release >= first:
            found = ops
    return found


def kernel_report(
    ask: Callable[..., dict[str, Any]], *, version: str, trees: int = 1000, where: str = ""
) -> KernelReport:
    """Probe the host: `ask` is Target.ask, `version` the SGLang there, `trees` how many random trees to try.

    Raises KernelProblem when the probe itself ends badly (killed, out of time, no output).
    """
    request = {"ops": [[role, *path] for role, path in ops_of(version).items()], "trees": trees, "seed": SEED}
    reply = ask(
        "run_python",
        source=PROBE.read_text(encoding="utf-8"),
        argv=[json.dumps(request)],
        env={},
        timeout=PROBE_TIMEOUT_S,
    )
    known: Any = {}
    try:
        for line in reply["stdout"].splitlines():
            known = json.loads(line)
        wrong = problem(known, _REPORT)
        if wrong:
            raise ValueError(wrong)
        return KernelReport(**{name: known[name] for name in _REPORT}, where=where)
    except (ValueError, RecursionError) as error:
        known = known if isinstance(known, dict) else {}
        known = {
            name: known[name] for name, shape in _VERSIONS.items() if name in known and not problem(known[name], shape)
        }
        installed = _installed(known.get("versions", {}), known.get("cuda"), known.get("driver"), known.get("gpus", ()))
        raise KernelProblem(
            f"the kernel probe ended with exit code {reply['rc']} and no report",
            where=where,
            next_step="a crash inside the kernel: check that torch, sglang-kernel and driver belong together",
            detail="\n".join([*_lines(installed), reply["stderr"][-4000:]]),
        ) from error


@dataclass(frozen=True)
class KernelReport:
    """What the probe found.

    `imports`: role -> {"path", "problem" or None}. `trees`: {"trees", "wrong", "first_wrong"}, None when the op was not
    called. `traps`: name -> {"as_known", "found"}. `sglang_available`: what SGLang itself says
    (is_dflash_sampling_verify_available), None when that could not be asked. `problem`: what a call raised.
    """

    versions: Mapping[str, str]
    driver: str | None
    cuda: str | None
    gpus: tuple[str, ...]
    imports: Mapping[str, Mapping[str, Any]]
    trees: Mapping[str, Any] | None
    traps: Mapping[str, Any] | None
    renorm: Mapping[str, bool] | None
    sglang_available: bool | None
    sglang_problem: str | None
    torch_problem: str | None
    problem: str | None
    where: str = ""

    @property
    def usable(self) -> bool:
        """The op is there, was called on a GPU, and was right every time."""
        return self.trees is not None and not self.wrong and not self.missing

    @property
    def missing(self) -> str:
        """Why the op cannot be used at all; empty when it can."""
        import_problem = self.imports["verify"]["problem"]
        if import_problem:
            return f"{self.imports['verify']['path']} cannot be imported: {import_problem}"
        if self.torch_problem:
            return f"torch cannot be imported: {self.torch_problem}"
        return "" if self.gpus else "torch sees no CUDA device"

    @property
    def wrong(self) -> str:
        """What the op, or a renormalisation, did wrong; empty when nothing was."""
        if self.problem:
            return f"the call raises: {self.problem}"
        if self.trees and self.trees["wrong"]:
            parts = ", ".join(
                key for key in ("predicts", "accept_index", "accept_token_num") if key in self.trees["first_wrong"]
            )
            return (
                f"{self.imports['verify']['path']} differs from the reference walk in {parts} "
                f"({self.trees['wrong']} of the calls, {self.trees['trees']} trees)"
            )
        bad = [name for name, right in (self.renorm or {}).items() if not right]
        return f"renormalisation is wrong: {', '.join(bad)}" if bad else ""

    @property
    def surprises(self) -> list[str]:
        """Traps of the op that are not as they are known: its callers' precautions may no longer be the right ones."""
        return [f"{name}: found {trap['found']}" for name, trap in (self.traps or {}).items() if not trap["as_known"]]

    def sampling_path(self, stage: str | None) -> str:
        """What T > 0 uses with this host's kernel. `stage`: the installed stage of the series, None for stock."""
        if stage and current_stage_name(stage) == GREEDY_STAGE:
            return REFUSED
        if self.usable and self.sglang_available is not False:
            return VERIFY
        return GREEDY if stage is None else FOLLOW

    def check(self, *, require: bool, stage: str | None) -> list[str]:
        """Warnings. Raises KernelProblem when the op is wrong, or when it is missing and `require` is set."""
        told = f"T > 0 uses {self.sampling_path(stage)}"
        if self.wrong:
            raise self._error(self.wrong, "install the sglang-kernel that belongs to this SGLang, torch and CUDA")
        if self.missing and require:
            raise self._error(
                f"{self.missing}; {told}", "install the kernel, or accept that: kernels.require = false in hosts.toml"
            )
        warnings = [f"{self.missing}; {told}"] if self.missing else []
        if not self.missing and self.sglang_available is False:
            warnings.append(f"SGLang itself says that the kernel is not available, although it works here; {told}")
        return warnings + [f"the kernel behaves in a new way: {surprise}" for surprise in self.surprises]

    def _error(self, what: str, next_step: str) -> KernelProblem:
        lines = _lines(self.installed())
        if self.trees and self.trees["first_wrong"]:
            lines.append(json.dumps(self.trees["first_wrong"]))
        return KernelProblem(what, where=self.where, next_step=next_step, detail="\n".join(lines))

    def installed(self) -> dict[str, str]:
        """Every version that matters when a kernel does not load."""
        return _installed(self.versions, self.cuda, self.driver, self.gpus)

    def facts(self) -> dict[str, str]:
        """For a reader: the versions, and what was found of the op."""
        found = self.missing or self.wrong or f"right on {self.trees['trees']} random trees"
        available = {True: "yes", False: "no", None: f"not known ({self.sglang_problem})"}[self.sglang_available]
        return {**self.installed(), "sampling kernel": found, "is_dflash_sampling_verify_available": available}

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "usable": self.usable,
            "missing": self.missing,
            "wrong": self.wrong,
            "surprises": self.surprises,
        }


def _installed(
    versions: Mapping[str, str], cuda: str | None, driver: str | None, gpus: Sequence[str]
) -> dict[str, str]:
    return {**versions, "CUDA": cuda or "none", "driver": driver or "none", "GPU": ", ".join(gpus) or "none"}


def _lines(installed: Mapping[str, str]) -> list[str]:
    return [f"{name} {version}" for name, version in installed.items()]
