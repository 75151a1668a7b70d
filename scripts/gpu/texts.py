"""Whole texts of 32 tokens: can anything tell a server's from plain decoding's?

Three tests for each server: a classifier on byte n-grams (cross-validated, better than a coin?), the length of the
first line, and the counts of all bigrams. Bigrams of one text depend on each other, so their statistic is compared
with its own values under random exchanges of whole texts between the two sides.
"""

import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from scipy import sparse, stats

from scripts.gpu.asking import on_all, sample_many, tokens_of
from scripts.gpu.exact import two_sample
from scripts.gpu.fleet import Run

SERVERS = ("plain", "tree", "tree-follow", "dflash", "tree-loose")
PROMPT = tokens_of(b"class Reader:\n    def ")
TOKENS = 32
NEWLINE = ord("\n") + 4
EXCHANGES = 20_000


def run(run: Run) -> dict:
    found: dict = {}

    def measure(temperature: float) -> list[dict]:
        params = {"temperature": temperature, "max_new_tokens": TOKENS, "ignore_eos": True}
        count = run.count(6000, 100)
        texts = on_all(run.ports(*SERVERS), lambda ports: sample_many(ports, PROMPT, params, count))
        others = SERVERS[1:]
        # Not by fork: this process has threads.
        with ProcessPoolExecutor(len(others), mp_context=multiprocessing.get_context("spawn")) as pool:
            compared = list(pool.map(compare, (texts[name] for name in others), [texts["plain"]] * len(others)))
        return [
            {"server": name, "against": "plain", "T": temperature, "n": count, "tokens": TOKENS} | found
            for name, found in zip(others, compared, strict=True)
        ]

    return run.steps("texts", found, {f"T {t}": lambda t=t: measure(t) for t in (1.0, 0.6)})


def compare(one: list[tuple], other: list[tuple]) -> dict:
    """{"classifier", "first_line", "bigrams"}: each with its p-value."""
    lengths = [[text.index(NEWLINE) if NEWLINE in text else TOKENS for text in texts] for texts in (one, other)]
    return {"classifier": _classifier(one, other), "first_line": two_sample(*lengths), "bigrams": _bigrams(one, other)}


def _classifier(one: list[tuple], other: list[tuple]) -> dict:
    from sklearn.feature_extraction import FeatureHasher
    from sklearn.linear_model import SGDClassifier
    from sklearn.model_selection import cross_val_predict

    grams = [[f"{n}:{text[i : i + n]}" for n in (1, 2, 3) for i in range(len(text) - n + 1)] for text in one + other]
    features = FeatureHasher(1 << 14, input_type="string", alternate_sign=False).transform(grams)
    features.data = np.minimum(features.data, 1.0)
    labels = np.repeat([0, 1], [len(one), len(other)])
    model = SGDClassifier(loss="log_loss", alpha=1e-3, random_state=0)
    right = int((cross_val_predict(model, features, labels, cv=5) == labels).sum())
    return {
        "accuracy": right / len(labels),
        "p": float(stats.binomtest(right, len(labels), 0.5, alternative="greater").pvalue),
    }


def _bigrams(one: list[tuple], other: list[tuple]) -> dict:
    """Sum over bigrams of (a - b)^2 / (a + b), and the share of exchanges that give as much."""
    texts = one + other
    names: dict[tuple, int] = {}
    columns = [[names.setdefault(pair, len(names)) for pair in itertools.pairwise(text)] for text in texts]
    rows = np.repeat(np.arange(len(texts)), [len(c) for c in columns])
    flat = np.concatenate([np.asarray(c) for c in columns])
    counts = sparse.csr_matrix((np.ones(len(flat)), (rows, flat)), (len(texts), len(names)))
    total = np.asarray(counts.sum(0)).ravel()
    side = np.repeat([1.0, -1.0], [len(one), len(other)])
    rng = np.random.default_rng(0)

    def statistic(sides: np.ndarray) -> np.ndarray:
        return ((counts.T @ sides) ** 2 / total[:, None]).sum(0)

    seen = statistic(side[:, None])[0]
    chunk = 500
    as_much = sum(
        int((statistic(rng.permuted(np.tile(side, (chunk, 1)), axis=1).T) >= seen).sum())
        for _ in range(EXCHANGES // chunk)
    )
    return {"bigrams": len(names), "statistic": float(seen), "p": (as_much + 1) / (EXCHANGES + 1)}
