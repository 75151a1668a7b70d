"""Tokens per verify step for every budget and number of candidates, from one set of texts. Prints one JSON object.

    python -m scripts.gpu.tree_acceptance PROMPTS TOKENS      in an environment with torch and the patched SGLang

Verification is exact, so the texts that a server with a tree emits are distributed as the target's own, and what a
tree accepts at a place of such a text is its longest path along the text. So texts are written once, by the target
alone; the draft's logits are computed at every place; SGLang's own `build_tree` makes the trees of every configuration
from them; and a step ends where the tree's path along the text does. Every configuration sees the same texts, so that
ratios are far more precise than between servers. No server is involved: the experiment `sweep` compares some points
with servers.

Everything is computed for two rotary bases of the draft: the one that the server uses, and the one of its checkpoint.
They differ where SGLang reads `rope_theta` from a configuration in which transformers 5 put it into `rope_parameters`:
the draft then runs with 1,000,000, whatever it was trained with.
"""

import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path

import torch

from scripts.gpu.asking import prompts
from scripts.gpu.pair_model import Pair

PAIR = Path(__file__).resolve().parents[2] / "tests" / "models" / "tiny-b8"
TEMPERATURES = (0.0, 0.6, 1.0)
BUDGETS, TOPKS = (7, 15, 31, 32, 63), (1, 2, 4, 8)
SHARPENED = (0.6, 0.8, 1.25)  # draft temperatures tried at budget 32, topk 8
TEXTS_AT_ONCE = 16


def load_tree_module():
    """ddtree_tree of the installed SGLang, which needs torch alone."""
    package = Path(importlib.util.find_spec("sglang").origin).parent
    path = package / "srt" / "speculative" / "ddtree_tree.py"
    spec = importlib.util.spec_from_file_location("ddtree_tree", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ddtree_tree"] = module
    spec.loader.exec_module(module)
    return module


def served_rope_theta(trained: float) -> float:
    """The draft's rotary base in a server of the installed SGLang."""
    from transformers import AutoConfig

    package = Path(importlib.util.find_spec("sglang").origin).parent
    if "rope_parameters" in (package / "srt" / "models" / "dflash.py").read_text():
        return trained
    return float(getattr(AutoConfig.from_pretrained(PAIR / "draft"), "rope_theta", 1_000_000))


def accepted(tree, future: torch.Tensor) -> torch.Tensor:
    """int64 [A]: drafted nodes on each tree's path along `future`, int64 [A, D], the tokens that follow its root."""
    actual = torch.cat((tree.tokens[:, :1], future), 1).gather(1, tree.depths)
    off_path = (tree.ancestors & (tree.tokens != actual)[:, None, :]).any(-1)
    return torch.where(off_path, 0, tree.depths).max(1).values


def steps_of(lengths: list[int]) -> int:
    """Verify steps of a text whose first token came from the prefill; lengths[i]: drafts accepted after token i."""
    at = steps = 0
    while at < len(lengths):
        at += lengths[at] + 1
        steps += 1
    return steps


def main() -> None:
    count, tokens = int(sys.argv[1]), int(sys.argv[2])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pair = Pair(PAIR, device)
    trained = float(pair.draft.config["rope_theta"])
    served = served_rope_theta(trained)
    measured = {}
    for theta in dict.fromkeys((served, trained)):
        pair.draft.config["rope_theta"] = theta
        measured[f"{theta:g}"] = measure(pair, count, tokens)
    print(
        json.dumps(
            {
                "device": device,
                "prompts": count,
                "tokens": tokens,
                "block": pair.block,
                "served_rope_theta": f"{served:g}",
                "trained_rope_theta": f"{trained:g}",
                "by_rope_theta": measured,
            }
        )
    )


def measure(pair: Pair, count: int, tokens: int) -> dict:
    """{"rows", "ranks"} with the pair as it is."""
    device, asked, build_tree = pair.device, prompts(count), load_tree_module().build_tree
    configurations = [(budget, topk, 1.0) for budget in BUDGETS for topk in TOPKS]
    configurations += [(32, 8, sharpened) for sharpened in SHARPENED]
    rows, ranks = [], []
    for temperature in TEMPERATURES:
        generator = torch.Generator().manual_seed(1)
        ids, features = pair.write(asked, tokens, temperature, generator)
        steps: dict[tuple, list[int]] = {configuration: [] for configuration in configurations}
        hits = torch.zeros(pair.block - 1, max(TOPKS) + 1, dtype=torch.int64)
        for begin in range(0, count, TEXTS_AT_ONCE):
            chunk = range(begin, min(begin + TEXTS_AT_ONCE, count))
            logits, futures, roots = [], [], []
            for p in chunk:
                end = len(asked[p]) + tokens
                # The last token is emitted by the step before it: no step starts there.
                anchors = torch.arange(len(asked[p]), end - 1, device=device)
                text = torch.cat((ids[p, :end], ids.new_full((pair.block,), -1)))
                logits.append(pair.drafts(text, features[p, : end - 1], anchors))
                futures.append(text[anchors[:, None] + torch.arange(1, pair.block, device=device)])
                roots.append(text[anchors])
            row, future, root = torch.cat(logits), torch.cat(futures), torch.cat(roots)
            best = row.topk(max(TOPKS), -1)
            hits += rank_hits(best.indices, future)
            for budget, topk, sharpened in configurations:
                if topk == 1:
                    logps = torch.zeros_like(best.values[..., :1])  # as the server: a chain has nothing to weigh
                else:
                    logps = (best.values / sharpened - (row / sharpened).logsumexp(-1, keepdim=True))[..., :topk]
                tree = build_tree(root, logps, best.indices[..., :topk].contiguous(), budget)
                lengths = accepted(tree, future).view(len(chunk), tokens - 1).tolist()
                steps[budget, topk, sharpened] += [steps_of(each) for each in lengths]
        for (budget, topk, sharpened), each in steps.items():
            lengths = [(tokens - 1) / n for n in each]
            rows.append(
                {
                    "T": temperature,
                    "budget": budget,
                    "topk": topk,
                    "draft_temperature": sharpened,
                    "accept_length": (tokens - 1) * count / sum(each),
                    "steps": sum(each),
                    "standard_error": statistics.stdev(lengths) / math.sqrt(count),
                }
            )
        ranks.append({"T": temperature, "share": (hits / hits.sum(1, keepdim=True)).tolist()})
    return {"rows": rows, "ranks": ranks}


def rank_hits(ids: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
    """int64 [D, K + 1]: how often the text's token at a depth has each rank in the draft's row there; last: none.

    ids int64 [A, D, K], future int64 [A, D] (-1 beyond the text).
    """
    depth, count = ids.shape[1:]
    same = ids == future[..., None]
    rank = torch.where(same.any(-1), same.int().argmax(-1), count)
    known = future >= 0
    return torch.stack([torch.bincount(rank[known[:, d], d], minlength=count + 1) for d in range(depth)]).cpu()


if __name__ == "__main__":
    main()
