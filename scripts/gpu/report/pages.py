"""The experiments: one raw page each, in the order in which a reader asks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """title: of the page. question: what the experiment answers, as one line of the table in docs/gpu-results.md."""

    title: str
    question: str


# {the stem of the page in docs/gpu: what it is}
PAGES = {
    "op": Page("The sampling op equals the reference walk", "Does the op accept what the reference walk accepts?"),
    "greedy": Page("Greedy texts are unchanged", "Are texts at T 0 those of plain decoding?"),
    "exact": Page("Sampling is exact: the first three tokens", "Are samples distributed as plain decoding's?"),
    "texts": Page("Sampling is exact: whole texts", "Can anything tell whole sampled texts apart?"),
    "cuts": Page("Sampling where rounding decides a cut", "Is a difference at a cut rounding, or the tree?"),
    "sweep": Page("A chain is a chain", "Does a tree of one branch accept what DFLASH accepts?"),
    "acceptance": Page("Acceptance", "How many tokens does a step emit, for each budget and topk?"),
    "cost": Page("The cost of a step", "What does sampling add to a step of an 8B?"),
    "tree-kernels": Page("Tree and draft candidates alone", "How long do the tree's kernels take?"),
    "target-probs": Page("The target distribution alone", "How long does the target distribution take?"),
    "renorm": Page("Where the release's top-p does not end", "Why does stock DFLASH stop answering some requests?"),
    "tp2": Page("Tensor parallel 2", "Do both ranks of a server commit the same path at every step?"),
    "mla": Page("A Kimi-shaped target", "Does it hold for MLA + MoE (a tiny, random target of that family)?"),
    "long": Page("Long and mixed", "Does a server survive clients of all kinds, and leak nothing?"),
    "tool": Page("The tool itself", "Do apply, verify, smoke-test and revert work on a GPU host?"),
    "refusals": Page("Bad input", "Is what cannot be served refused in one sentence, without harm to others?"),
}
