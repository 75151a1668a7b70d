"""What is shown on a GPU: each experiment takes ports of running servers and returns one JSON document.

The pair is byte-level (token id = byte + 4, 1 begins), so prompts are slices of the standard library's sources.
"""

import collections
import itertools
import math
import os
import platform
import statistics
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import numpy as np
from scipy import stats

from scripts.gpu.server import generate

EXACT_PROMPT = [1, *(byte + 4 for byte in b"import os\nimport ")]  # many continuations: power against small biases
CELLS = {
    "plain": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20": {"top_k": 20},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 20, top_p 0.9": {"top_k": 20, "top_p": 0.9},
}


def prompts(count: int, length: int = 96) -> list[list[int]]:
    """Prompts of different places and lengths (half of `length` up to all of it), the same on every call."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(
        (root / name).read_bytes()
        for name in ("argparse.py", "tarfile.py", "typing.py", "pathlib.py")
        if (root / name).is_file()
    )
    step = (len(text) - length) // count
    return [
        [1, *(byte + 4 for byte in text[i * step : i * step + length // 2 + i % (length // 2)])] for i in range(count)
    ]


def ask(port: int, asked: list[list[int]], params: dict, concurrency: int) -> list[dict]:
    """One request a prompt, `concurrency` in flight; answers in order."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: generate(port, prompt, params)[0], asked))


def on_all(ports: dict[str, int], action) -> dict:
    """{name: action(port)} for all servers at once."""
    with ThreadPoolExecutor(len(ports)) as pool:
        running = {name: pool.submit(action, port) for name, port in ports.items()}
        return {name: future.result() for name, future in running.items()}


def greedy(ports: dict[str, int], plain: str, count: int = 100, tokens: int = 256) -> dict:
    """T=0 texts of every server against plain decoding's, at batches 1, 4 and 16, and the margin where they part."""
    asked = prompts(count)
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    rows = []
    for concurrency in (1, 4, 16):
        outputs = on_all(ports, lambda port, c=concurrency: [a["output_ids"] for a in ask(port, asked, params, c)])
        for name in ports:
            if name == plain:
                continue
            differing = [i for i in range(count) if outputs[name][i] != outputs[plain][i]]
            rows.append(
                {
                    "server": name,
                    "against": plain,
                    "batch": concurrency,
                    "prompts": count,
                    "tokens": tokens,
                    "differing": len(differing),
                    "margins": [
                        _margin(ports[plain], asked[i], outputs[plain][i], outputs[name][i]) for i in differing
                    ],
                }
            )
        rows += [
            {
                "server": a,
                "against": b,
                "batch": concurrency,
                "prompts": count,
                "tokens": tokens,
                "differing": sum(x != y for x, y in zip(outputs[a], outputs[b], strict=True)),
            }
            for a, b in itertools.combinations([n for n in ports if n != plain], 2)
        ]
    return {"rows": rows}


def _margin(plain_port: int, prompt: list[int], one: list[int], other: list[int]) -> float:
    """Difference of the two best log-probabilities that plain decoding sees where the two texts part."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    asked = {"temperature": 0, "max_new_tokens": 1}
    (answer,) = generate(plain_port, prompt + one[:at], asked, return_logprob=True, top_logprobs_num=2)
    best = answer["meta_info"]["output_top_logprobs"][0]
    return float(best[0][0] - best[1][0])


def sample_many(port: int, prompt: list[int], params: dict | list, count: int, batch: int = 256) -> list[tuple]:
    """`count` completions of one prompt, `batch` a request, two requests in flight."""
    sizes = [min(batch, count - begin) for begin in range(0, count, batch)]

    def one(size: int) -> list[tuple]:
        asked = params if isinstance(params, dict) else params[:size]
        return [tuple(answer["output_ids"]) for answer in generate(port, [prompt] * size, asked)]

    with ThreadPoolExecutor(2) as pool:
        return [text for texts in pool.map(one, sizes) for text in texts]


def two_sample(one: list, other: list) -> dict:
    """Chi-square of homogeneity over the categories; those expected fewer than 5 times in a sample are pooled."""
    a, b = collections.Counter(one), collections.Counter(other)
    share = min(len(one), len(other)) / (len(one) + len(other))
    kept = [key for key in a | b if (a[key] + b[key]) * share >= 5]
    table = np.array([[a[key] for key in kept], [b[key] for key in kept]], dtype=float)
    rest = np.array([[len(one) - table[0].sum()], [len(other) - table[1].sum()]])
    if rest.sum() * share >= 5:
        table = np.hstack([table, rest])
    if table.shape[1] < 2:
        return {"categories": int(table.shape[1]), "chi2": 0.0, "p": 1.0, "total_variation": 0.0}
    chi2, p, _, _ = stats.chi2_contingency(table, correction=False)
    shares = table / table.sum(1, keepdims=True)
    return {
        "categories": int(table.shape[1]),
        "chi2": float(chi2),
        "p": float(p),
        "total_variation": float(abs(shares[0] - shares[1]).sum() / 2),
    }


def exact(ports: dict[str, int], plain: str, temperature: float, cell: str, count: int) -> list[dict]:
    """First three tokens after a prompt, `count` samples: every server against plain decoding."""
    params = {"temperature": temperature, "max_new_tokens": 3, "ignore_eos": True} | CELLS[cell]
    texts = on_all(ports, lambda port: sample_many(port, EXACT_PROMPT, params, count))
    return [
        {"server": name, "against": plain, "T": temperature, "cell": cell, "n": count}
        | two_sample(texts[name], texts[plain])
        for name in ports
        if name != plain
    ]


def exact_mixed(ports: dict[str, int], plain: str, count: int) -> list[dict]:
    """Every second request of a batch is greedy: the sampled ones (`count`) stay exact, the greedy ones greedy."""
    sampled = {"temperature": 1.0, "max_new_tokens": 3, "ignore_eos": True}
    mixed = [sampled, sampled | {"temperature": 0}] * 128
    texts = on_all(ports, lambda port: sample_many(port, EXACT_PROMPT, mixed, count * 2))
    rows = []
    for name in ports:
        if name != plain:
            greedy_texts = set(texts[name][1::2])
            rows.append(
                {
                    "server": name,
                    "against": plain,
                    "T": 1.0,
                    "cell": "mixed with greedy",
                    "n": count,
                    "greedy_texts": len(greedy_texts),
                    "greedy_equal": greedy_texts == set(texts[plain][1::2]),
                }
                | two_sample(texts[name][::2], texts[plain][::2])
            )
    return rows


def texts(ports: dict[str, int], plain: str, count: int = 3000, tokens: int = 32) -> dict:
    """Whole texts of 32 tokens: can a classifier on byte n-grams tell a server's from plain decoding's?"""
    from sklearn.feature_extraction import FeatureHasher
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict

    prompt = [1, *(byte + 4 for byte in b"class Reader:\n    def ")]
    params = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    found = on_all(ports, lambda port: sample_many(port, prompt, params, count))
    rows = []
    for name in ports:
        if name == plain:
            continue
        both = found[name] + found[plain]
        grams = [[f"{n}:{text[i : i + n]}" for n in (1, 2, 3) for i in range(len(text) - n + 1)] for text in both]
        features = FeatureHasher(1 << 14, input_type="string").transform(grams)
        labels = np.repeat([0, 1], [len(found[name]), len(found[plain])])
        guess = cross_val_predict(LogisticRegression(C=0.05, max_iter=300), features, labels, cv=5)
        right = int((guess == labels).sum())
        rows.append(
            {
                "server": name,
                "against": plain,
                "n": count,
                "tokens": tokens,
                "accuracy": right / len(labels),
                "p": float(stats.binomtest(right, len(labels), 0.5, alternative="greater").pvalue),
            }
            | {"first_tokens": two_sample([t[:4] for t in found[name]], [t[:4] for t in found[plain]])}
        )
    return {"rows": rows}


def acceptance(
    ports: dict[str, int], temperatures=(0.0, 0.6, 1.0), count: int = 64, tokens: int = 192, concurrency: int = 4
) -> dict:
    """Mean tokens per verify step of every server at every temperature, on the same prompts."""
    asked = prompts(count)

    def measure(port: int) -> list[dict]:
        rows = []
        for temperature in temperatures:
            params = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
            infos = [answer["meta_info"] for answer in ask(port, asked, params, concurrency)]
            lengths = [(i["completion_tokens"] - 1) / i["spec_verify_ct"] for i in infos]
            steps = sum(i["spec_verify_ct"] for i in infos)
            rows.append(
                {
                    "T": temperature,
                    "prompts": count,
                    "tokens": tokens,
                    "steps": steps,
                    "accept_length": sum(i["completion_tokens"] - 1 for i in infos) / steps,
                    "standard_error": statistics.stdev(lengths) / math.sqrt(count),
                }
            )
        return rows

    found = on_all(ports, measure)
    return {"rows": [{"server": name} | row for name, rows in found.items() for row in rows]}


def host() -> dict:
    """What an experiment ran on."""
    gpus = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    names = ("torch", "triton", "scipy", "numpy")
    return {
        "gpus": gpus.stdout.strip().split("\n") if gpus.returncode == 0 else [],
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {name: metadata.version(name) for name in names},
    }
