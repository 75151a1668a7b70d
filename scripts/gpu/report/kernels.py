"""Sections of the kernels' own benchmarks (scripts/bench_tree.py, scripts/bench_target_probs.py)."""

from scripts.gpu.report.documents import Section, opened, table

_TREE_GOAL = 120  # microseconds for build and compile of a whole batch of up to 32, at budget 64


def tree(document: dict) -> Section:
    """Build and compile, and the draft's top-k, which is reported apart."""
    result = document["result"]
    section = opened(
        "tree-kernels",
        document,
        f"GPU microseconds, depth {result['depth']}, topk {result['topk']}, budget {result['budget']}, vocabulary "
        f"{result['vocabulary']:,}, prefixes of {result['prefix']:,} tokens: the kernels, and the torch operations "
        "that they replaced, in one run. `top-k` includes the norm over the vocabulary; `torch.topk` stands alone.",
    )
    cases = {(row["case"], row["bs"]): row for row in result["results"]}
    sizes = sorted({bs for _, bs in cases})
    worst = max(cases["tree_case", bs]["kernels"]["gpu"] for bs in sizes)
    section.rows.append(
        (
            "build, compile and mask of a batch",
            f"batches {sizes[0]} to {sizes[-1]}, median of {result['runs']}",
            f"<= {_TREE_GOAL} us",
            f"at most {worst:.0f} us",
            worst <= _TREE_GOAL,
        )
    )
    section.found = f"build, compile and mask of a batch up to {sizes[-1]}: at most {worst:.0f} us"
    section.lines += table(
        ("batch", "tree + mask, torch", "kernels", "ratio", "top-k, torch", "torch.topk", "kernels", "ratio"),
        [
            (
                bs,
                *(f"{cases['tree_case', bs][who]['gpu']:.1f}" for who in ("torch", "kernels")),
                f"{cases['tree_case', bs]['torch']['gpu_over_kernels']:.0f}",
                *(f"{cases['top_case', bs][who]['gpu']:.1f}" for who in ("torch", "topk", "kernels")),
                f"{cases['top_case', bs]['torch']['gpu_over_kernels']:.0f}",
            )
            for bs in sizes
        ],
    )
    return section


def target_probs(document: dict) -> Section:
    """The target distribution, beside the torch operations and a plain argmax."""
    result = document["result"]
    section = opened(
        "target-probs",
        document,
        f"GPU microseconds for {result['nodes']} rows a request, vocabulary {result['vocab']:,}, median of "
        f"{result['runs']} runs of {result['calls_a_run']} calls. `flat` and `peaked` logits are rounded as a "
        "model's, `smooth` ones are not; a flat nucleus of most of the vocabulary is the worst case.",
    )
    least, most = (f(row["kernel"]["gpu"] for row in result["rows"]) for f in (min, max))
    section.found = f"{least:.0f} to {most:,.0f} us, batches 1 to {max(row['bs'] for row in result['rows'])}"
    section.lines += table(
        ("batch", "logits", "setting", "argmax", "kernel", "above argmax", "torch", "torch / kernel"),
        [
            (
                row["bs"],
                row["logits"],
                row["setting"],
                row["argmax"]["gpu"],
                row["kernel"]["gpu"],
                row["gpu_above_argmax"],
                row["torch"]["gpu"],
                row["torch_over_kernel"],
            )
            for row in result["rows"]
        ],
    )
    return section
