"""What is emitted at T > 0 is distributed as token-by-token sampling of the target would have it.

One verify step emits the accepted tokens and the bonus. Their exact joint distribution follows from the target's rows
(float64, oracles.py), and DRAWS steps are counted against it: chi-square, and a seeded test fails only beyond the
1 - 1e-6 quantile. The same statistic is shown to reject rules that are known to be biased.
"""

import random
from collections import Counter

import chi_square
import pytest
import torch
from exact import emitted_sequences, target_row
from fakes import FakeTreeSamplingOpByReferenceWalk, make_batch
from sglang.srt.speculative.ddtree_decide import decide
from sglang.srt.speculative.ddtree_tree import build_tree, compile_tree

DRAWS = 50_000  # for each request kind and each way of deciding
BATCH = 1000
VOCAB, DEPTH, RANKS, BUDGET = 8, 3, 4, 9
KINDS = {
    "T=1": {"temperature": 1.0},
    "T=0.6": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k and top_p": {"temperature": 1.3, "top_k": 5, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.25},
}
GREEDY = {"temperature": 0.0}


def draft(seed=7):
    """One request's draft: (log-probabilities [1, DEPTH, VOCAB], tree). The draft knows the target a little."""
    generator = torch.Generator().manual_seed(seed)
    logps = torch.log_softmax(torch.randn(1, DEPTH, VOCAB, generator=generator) * 1.5, -1)
    values, ids = logps.topk(RANKS)
    return logps, build_tree(torch.tensor([5]), values, ids, BUDGET)


def target_logits(logps, tree, seed=8):
    """float32 [N, VOCAB]: at each node something between the draft's opinion of the next position and noise."""
    generator = torch.Generator().manual_seed(seed)
    opinion = logps[0, tree.depths[0].clamp(max=DEPTH - 1)]
    return 0.7 * opinion + torch.randn(opinion.shape, generator=generator)


def repeat(tree, bs):
    """The same request bs times. The arrays that hold global rows are compiled anew."""
    fields = (tree.tokens, tree.parents, tree.depths, tree.node_logws)
    return compile_tree(*(field.repeat(bs, 1) for field in fields), DEPTH)


def count_steps(tree, logits, settings, draws):
    """Counter of emitted sequences for each of `settings` (they share every batch), `draws` each."""
    copies = BATCH // len(settings)
    bs = copies * len(settings)
    batch_tree = repeat(tree, bs)
    batch = make_batch(settings * copies, VOCAB)
    counts = [Counter() for _ in settings]
    while sum(counts[0].values()) < draws:
        decision = decide(
            batch_tree, logits.repeat(bs, 1), sampling_info=batch.sampling_info, reqs=batch.reqs, width=DEPTH + 1
        )
        assert not decision.failed.any()
        tokens = batch_tree.tokens.gather(1, decision.path.clamp(min=0))
        rows = torch.cat((decision.accept_len[:, None], decision.bonus[:, None], tokens[:, 1:]), 1).tolist()
        for b, (accepted, bonus, *path) in enumerate(rows):
            counts[b % len(settings)][(*path[:accepted], bonus)] += 1
    return counts


def expected_of(tree, logits, one):
    rows = [target_row(row.tolist(), **one) for row in logits]
    assert min(margin for _, margin in rows) > 1e-4, "choose other seeds: rounding may decide a row"
    return emitted_sequences(tree.tokens[0].tolist(), tree.parents[0].tolist(), [row for row, _ in rows])


def lengths(counts):
    found = Counter()
    for sequence, count in counts.items():
        found[len(sequence)] += count
    return found


@pytest.fixture(scope="module")
def mixed_batches():
    """{way of deciding: counts of all kinds and of a greedy request, from batches that hold them all}."""
    return {}


def count_mixed(decide_path, mixed_batches):
    if decide_path not in mixed_batches:
        logps, tree = draft()
        mixed_batches[decide_path] = count_steps(tree, target_logits(logps, tree), [*KINDS.values(), GREEDY], DRAWS)
    return mixed_batches[decide_path]


def test_all_kinds_and_greedy_in_one_batch(decide_path, mixed_batches):
    logps, tree = draft()
    logits = target_logits(logps, tree)
    for one, counts in zip([*KINDS.values(), GREEDY], count_mixed(decide_path, mixed_batches), strict=True):
        statistic, limit = chi_square.against(counts, expected_of(tree, logits, one))
        assert statistic < limit, (one, statistic, limit)
        assert (len(counts) == 1) == (one is GREEDY)
        assert one is GREEDY or len(lengths(counts)) > 1, "the tree must matter"


@pytest.mark.parametrize("name", ["T=1", "top_k and top_p"])
def test_a_kind_alone(name, decide_path):
    """T=1 alone is filtered by nothing; the other sees only as many ranks as its top_k."""
    logps, tree = draft(seed=11)
    logits = target_logits(logps, tree, seed=12)
    (counts,) = count_steps(tree, logits, [KINDS[name]], DRAWS)
    statistic, limit = chi_square.against(counts, expected_of(tree, logits, KINDS[name]))
    assert statistic < limit, (statistic, limit)


def test_both_ways_accept_and_emit_alike(mixed_batches, install_op, request):
    install_op(FakeTreeSamplingOpByReferenceWalk())
    by_op = count_mixed("op by stand-in", mixed_batches)
    request.getfixturevalue("no_op")
    by_following = count_mixed("sample-and-follow", mixed_batches)
    logps, tree = draft()
    for one, first, second in zip([*KINDS.values(), GREEDY], by_op, by_following, strict=True):
        exact = Counter()
        for sequence, probability in expected_of(tree, target_logits(logps, tree), one).items():
            exact[len(sequence)] += probability
        assert chi_square.same(first, second), one
        assert chi_square.fits(lengths(first), exact) and chi_square.fits(lengths(second), exact), one


def test_flashinfers_order_of_filters(no_op, settings):
    """With min_p somewhere in the batch its sampler filters in sequence, so all requests of the batch do."""
    settings.sampling_backend = "flashinfer"
    logps, tree = draft()
    logits = target_logits(logps, tree)
    kinds = [{"temperature": 1.0, "top_k": 4, "top_p": 0.75, "min_p": 0.05}, KINDS["top_k and top_p"]]
    for one, counts in zip(kinds, count_steps(tree, logits, kinds, DRAWS), strict=True):
        rows = [target_row(row.tolist(), **one, sequential=True) for row in logits]
        assert min(margin for _, margin in rows) > 1e-4
        exact = emitted_sequences(tree.tokens[0].tolist(), tree.parents[0].tolist(), [row for row, _ in rows])
        assert chi_square.fits(counts, exact)
        assert not chi_square.fits(counts, expected_of(tree, logits, one)), "the joint rule is another distribution"


# ---- the statistic can tell --------------------------------------------------------------------------------


def biased(statistic_and_limit):
    statistic, limit = statistic_and_limit
    return statistic > 2 * limit


def test_rejects_the_acceptance_threshold_0_5(install_op, settings):
    """SGLang's own knob for trading exactness for speed; it must be off in these tests, and is seen when on."""
    install_op(FakeTreeSamplingOpByReferenceWalk())
    settings.speculative_accept_threshold_acc = 0.5
    logps, tree = draft()
    logits = target_logits(logps, tree)
    (counts,) = count_steps(tree, logits, [KINDS["T=1"]], DRAWS)
    assert biased(chi_square.against(counts, expected_of(tree, logits, KINDS["T=1"])))


def test_rejects_duplicate_siblings(install_op):
    """The same token twice under one parent is counted twice by the op."""
    install_op(FakeTreeSamplingOpByReferenceWalk())
    logps, tree = draft()
    logits = target_logits(logps, tree)
    tokens = torch.tensor([[5, 1, 1, 2]])
    parents = torch.tensor([[-1, 0, 0, 0]])
    depths = torch.tensor([[0, 1, 1, 1]])
    doubled = compile_tree(tokens, parents, depths, torch.zeros(1, 4), DEPTH)
    (counts,) = count_steps(doubled, logits[:4], [KINDS["T=1"]], DRAWS)
    rows = [target_row(row.tolist())[0] for row in logits[:4]]
    exact = emitted_sequences([5, 1, 2], [-1, 0, 0], [rows[0], rows[1], rows[3]])
    assert biased(chi_square.against(counts, exact))


def min_of_1_and_p_over_q(tree, marginals, rows, rng):
    """Leviathan's rule with the draft's marginals as q, though no child was sampled from them: emitted tokens."""
    node, tokens = 0, []
    while True:
        row, child = list(rows[node]), tree.retrieve_next_token[0, node].item()
        while child != -1:
            token = tree.tokens[0, child].item()
            q = marginals[len(tokens)][token]
            if rng.random() <= min(1.0, row[token] / q):
                break
            left = [max(p - (q if t == token else 0.0), 0.0) for t, p in enumerate(row)]
            row = [p / sum(left) for p in left]
            child = tree.retrieve_next_sibling[0, child].item()
        if child == -1:
            return (*tokens, rng.choices(range(len(row)), row)[0])
        tokens.append(tree.tokens[0, child].item())
        node = child


def sampled_not_emitted(tree, marginals, rows, rng):
    """The accepted path is right, but the bonus is drawn anew from the whole row, children included."""
    node, tokens = 0, []
    while True:
        token = rng.choices(range(VOCAB), rows[node])[0]
        child = tree.retrieve_next_token[0, node].item()
        while child != -1 and tree.tokens[0, child].item() != token:
            child = tree.retrieve_next_sibling[0, child].item()
        if child == -1:
            return (*tokens, rng.choices(range(VOCAB), rows[node])[0])
        tokens.append(token)
        node = child


def argmax_only(tree, marginals, rows, rng):
    """What stock does without the op."""
    node, tokens = 0, []
    while True:
        token = max(range(VOCAB), key=lambda t: rows[node][t])
        child = tree.retrieve_next_token[0, node].item()
        while child != -1 and tree.tokens[0, child].item() != token:
            child = tree.retrieve_next_sibling[0, child].item()
        tokens.append(token)
        if child == -1:
            return tuple(tokens)
        node = child


@pytest.mark.parametrize("rule", [min_of_1_and_p_over_q, sampled_not_emitted, argmax_only])
def test_rejects_a_rule_that_is_biased(rule):
    logps, tree = draft()
    logits = target_logits(logps, tree)
    rows = [target_row(row.tolist())[0] for row in logits]
    rng = random.Random(5)
    counts = Counter(rule(tree, logps[0].exp().tolist(), rows, rng) for _ in range(DRAWS))
    assert biased(chi_square.against(counts, expected_of(tree, logits, KINDS["T=1"])))
