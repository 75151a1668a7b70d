"""Is the sampling kernel there, and is it right? Run on the GPU host by the environment's own interpreter.

Stand-alone (CPython >= 3.9; torch and the kernel are imported where they are used, and may be missing): its text is
sent to the host and run with one JSON request as the only argument; it prints JSON objects, one a line. The last is the
report; those before it hold what was known before something was tried that may end the process.

That a kernel can be imported proves little: on some builds the wrapper imports and the call raises. So the real op is
called on small random trees and must give what `reference_walk` gives, bit for bit. Target probabilities and coins are
whole numbers over 2**12, so that every sum and product of them is exact in 32 bits, in any order, and nothing is left
to rounding.
"""

import importlib
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys

DENOMINATOR = 1 << 12
UNWRITTEN_INDEX = -1  # what accept_index is filled with before the call, since the op writes only accepted entries
UNWRITTEN_TOKEN = 0  # the same for predicts
TREES_PER_CALL = 8
DISTRIBUTIONS = ("sglang", "sglang-kernel", "sgl-kernel", "torch", "triton", "flashinfer-python")


# ---- the reference -----------------------------------------------------------------------------------------


def reference_walk(tree, target, coins, final_coin, depth_limit):
    """What the op decides for one request: (accepted nodes from the root on, emitted tokens, one for each of them).

    tree: {"tokens", "next_token", "next_sibling"}: lists over the nodes; -1 ends a chain of links; node 0 is the root.
    target: a row of probabilities for each node. coins: one for each node. depth_limit: how many nodes at most are
    accepted, the root included.

    At a node, its children are tried in sibling order: a running sum takes in the target's probability of the child's
    token, and the child is accepted when the node's coin is not above that sum. What was rejected is taken out of the
    row. The last token comes from what is left of the last row.
    """
    node, accepted, emitted, rejected = 0, [0], [], []
    while len(accepted) < depth_limit:
        rejected, total, child = [], 0.0, tree["next_token"][node]
        while child != -1:
            token = tree["tokens"][child]
            total += target[node][token]
            if coins[node] <= total:
                break
            rejected.append(token)
            child = tree["next_sibling"][child]
        if child == -1:
            break
        node, rejected = child, []
        accepted.append(node)
        emitted.append(tree["tokens"][node])
    # At the depth limit no child was tried, so nothing is taken out (`rejected` is empty there).
    left = [0.0 if token in rejected else probability for token, probability in enumerate(target[node])]
    emitted.append(draw(left, final_coin))
    return accepted, emitted


def draw(weights, coin):
    """The first token whose running sum is above coin * total, else the last that has weight, else the last of all."""
    limit, total, last = coin * sum(weights), 0.0, len(weights) - 1
    for token, weight in enumerate(weights):
        total += weight
        if weight > 0:
            last = token
            if total > limit:
                return token
    return last


# ---- random cases ------------------------------------------------------------------------------------------


def random_tree(rng, nodes, vocabulary):
    """A tree of at most `nodes` nodes, siblings with different tokens; the rest are pads, which no link leads to."""
    used = rng.randint(1, nodes)
    tree = {
        "tokens": [rng.randrange(vocabulary) for _ in range(nodes)],
        "next_token": [-1] * nodes,
        "next_sibling": [-1] * nodes,
    }
    depth, last_child, taken = [0] * nodes, {}, {}
    for node in range(1, used):
        parent = rng.randrange(max(0, node - 4), node)
        free = [token for token in range(vocabulary) if token not in taken.setdefault(parent, set())]
        if not free:
            parent = node - 1
            free = [token for token in range(vocabulary) if token not in taken.setdefault(parent, set())]
        tree["tokens"][node] = rng.choice(free)
        taken[parent].add(tree["tokens"][node])
        if parent in last_child:
            tree["next_sibling"][last_child[parent]] = node
        else:
            tree["next_token"][parent] = node
        last_child[parent] = node
        depth[node] = depth[parent] + 1
    return tree, max(depth) + 1


def random_row(rng, vocabulary, likely):
    """A row of exact probabilities that sum to 1; most of the mass is on the tokens `likely`, if there are any."""
    support = set(rng.sample(range(vocabulary), min(vocabulary, rng.randint(1, 6))))
    support |= {token for token in likely if rng.random() < 0.8}
    support = sorted(support)
    cuts = sorted(rng.randint(0, DENOMINATOR) for _ in support[1:])
    row = [0.0] * vocabulary
    for token, low, high in zip(support, [0, *cuts], [*cuts, DENOMINATOR]):
        row[token] = (high - low) / DENOMINATOR
    return row


def random_request(rng, nodes, vocabulary):
    """One request: {"tree", "target", "coins" in (0, 1], "final_coin" in [0, 1), "depth"}."""
    tree, depth = random_tree(rng, nodes, vocabulary)
    target = []
    for node in range(nodes):
        children, child = [], tree["next_token"][node]
        while child != -1:
            children.append(tree["tokens"][child])
            child = tree["next_sibling"][child]
        target.append(random_row(rng, vocabulary, children))
    return {
        "tree": tree,
        "target": target,
        "depth": depth,
        "coins": [rng.randint(1, DENOMINATOR) / DENOMINATOR for _ in range(nodes)],
        "final_coin": rng.randrange(DENOMINATOR) / DENOMINATOR,
    }


def random_call(rng):
    """(requests, depth limit) for one call of the op; they share the number of nodes and the vocabulary."""
    nodes, vocabulary = rng.choice([1, 2, 3, 5, 9, 17]), rng.choice([2, 8, 31, 64, 320])
    requests = [random_request(rng, nodes, vocabulary) for _ in range(TREES_PER_CALL)]
    deepest = max(request["depth"] for request in requests)
    return requests, max(1, rng.choice([deepest, deepest, deepest, deepest - 1]))


def expected_arrays(requests, depth_limit):
    """(predicts, accept_index, accept_token_num) as the op must leave them, given the fill values above."""
    nodes = len(requests[0]["coins"])
    predicts, index, counts = [UNWRITTEN_TOKEN] * (nodes * len(requests)), [], []
    for row, request in enumerate(requests):
        accepted, emitted = reference_walk(
            request["tree"], request["target"], request["coins"], request["final_coin"], depth_limit
        )
        for node, token in zip(accepted, emitted):
            predicts[row * nodes + node] = token
        rows = [row * nodes + node for node in accepted]
        index.append(rows + [UNWRITTEN_INDEX] * (depth_limit - len(rows)))
        counts.append(len(accepted) - 1)  # the root is not counted
    return predicts, index, counts


# ---- the op ------------------------------------------------------------------------------------------------


def call_op(op, requests, depth_limit, device, scratch=0.0):
    """Call the real op; gives (predicts, accept_index, accept_token_num) as lists. `scratch`: draft_probs' fill."""
    import torch

    count, nodes = len(requests), len(requests[0]["coins"])

    def ints(values):
        return torch.tensor(values, dtype=torch.int64, device=device)

    def floats(values):
        return torch.tensor(values, dtype=torch.float32, device=device)

    target = floats([request["target"] for request in requests]).contiguous()
    predicts = torch.full((count * nodes,), UNWRITTEN_TOKEN, dtype=torch.int32, device=device)
    index = torch.full((count, depth_limit), UNWRITTEN_INDEX, dtype=torch.int32, device=device)
    counts = torch.zeros(count, dtype=torch.int32, device=device)
    op(
        predicts=predicts,
        accept_index=index,
        accept_token_num=counts,
        candidates=ints([request["tree"]["tokens"] for request in requests]),
        retrive_index=ints([[row * nodes + node for node in range(nodes)] for row in range(count)]),
        retrive_next_token=ints([request["tree"]["next_token"] for request in requests]),
        retrive_next_sibling=ints([request["tree"]["next_sibling"] for request in requests]),
        uniform_samples=floats([request["coins"] for request in requests]),
        uniform_samples_for_final_sampling=floats([request["final_coin"] for request in requests]),
        target_probs=target,
        draft_probs=torch.full_like(target, scratch),
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
    )
    return predicts.tolist(), index.tolist(), counts.tolist()


def compare_trees(op, trees, seed, device):
    """{"trees", "wrong", "first_wrong"}: the op against the reference on at least `trees` random trees."""
    rng, done, wrong, first = random.Random(seed), 0, 0, None
    while done < trees:
        requests, depth_limit = random_call(rng)
        expected, found = expected_arrays(requests, depth_limit), call_op(op, requests, depth_limit, device)
        done += len(requests)
        if found != expected:
            wrong += 1
            if first is None:
                names = ("predicts", "accept_index", "accept_token_num")
                first = {
                    "after": done,
                    "nodes": len(requests[0]["coins"]),
                    "vocabulary": len(requests[0]["target"][0]),
                    **{name: {"expected": e, "found": f} for name, e, f in zip(names, expected, found) if e != f},
                }
    return {"trees": done, "wrong": wrong, "first_wrong": first}


def probe_traps(op, device):
    """What the op does with inputs that callers must avoid: for each whether it is the behaviour that is known."""
    tree = {"tokens": [0, 1], "next_token": [1, -1], "next_sibling": [-1, -1]}
    impossible = {"tree": tree, "target": [[1.0, 0.0, 0.0, 0.0]] * 2, "coins": [0.0, 0.0], "final_coin": 0.5}
    missing = {"tree": tree, "target": [[0.25, 0.0, 0.5, 0.25]] * 2, "coins": [1.0, 1.0], "final_coin": 0.5}
    not_a_number = dict(missing, target=[[float("nan")] * 4] * 2)
    last_coin = dict(missing, target=[[0.25, 0.0, 0.75, 0.0]] * 2, final_coin=1.0)

    def first_token(request, scratch=0.0):
        predicts, _, counts = call_op(op, [request], 2, device, scratch)
        return predicts[0], counts[0]

    coin = first_token(impossible)
    dirty = first_token(missing, scratch=1.0)
    nan = first_token(not_a_number)
    last = first_token(last_coin)
    return {
        "coin_0_accepts_impossible_child": {"as_known": coin == (1, 1), "found": coin},
        "dirty_scratch_gives_last_token": {"as_known": dirty == (3, 0), "found": dirty},
        "nan_gives_last_token": {"as_known": nan == (3, 0), "found": nan},
        "final_coin_1_gives_last_possible_token": {"as_known": last == (2, 0), "found": last},
    }


def check_renorm(top_k, top_p, device):
    """Whether top-k 2 and top-p 0.7 leave the first two of 1/2, 1/4, 1/8, 1/8, as 2/3 and 1/3 (within 1e-6)."""
    import torch

    row = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float32, device=device)
    k = top_k(row, torch.tensor([2], dtype=torch.int32, device=device)).tolist()[0]
    p = top_p(row, torch.tensor([0.7], dtype=torch.float32, device=device)).tolist()[0]
    expected = [2 / 3, 1 / 3, 0.0, 0.0]
    return {
        "top_k": max(abs(a - b) for a, b in zip(k, expected)) < 1e-6,
        "top_p": max(abs(a - b) for a, b in zip(p, expected)) < 1e-6,
    }


# ---- the environment ---------------------------------------------------------------------------------------


def versions():
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def attempt(action):
    """(result, None), or (None, what went wrong, in one line)."""
    try:
        return action(), None
    except (Exception, SystemExit) as error:  # an op or an import can fail in any way; the report names it
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def load(module, name):
    return getattr(importlib.import_module(module), name)


def look_at_gpu():
    import torch

    found = {"cuda": torch.version.cuda, "gpus": []}
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, timeout=60, check=True)
    return result.stdout.decode().split("\n")[0].strip()


def probe(request, tell=lambda known: None):
    """The report; see KernelReport in kernels.py for its keys. `tell` gets the parts that are known early."""
    report = {"versions": versions(), "driver": attempt(driver)[0]}
    tell(report)
    gpu, report["torch_problem"] = attempt(look_at_gpu)
    report.update(gpu or {"cuda": None, "gpus": []})
    tell(report)
    ops, problems = {}, {}
    for role, module, name in request["ops"]:
        ops[role], problem = attempt(lambda module=module, name=name: load(module, name))
        if problem:
            problems[role] = problem
    report["imports"] = {
        role: {"path": f"{module}.{name}", "problem": problems.get(role)} for role, module, name in request["ops"]
    }
    report["sglang_available"], report["sglang_problem"] = attempt(
        lambda: bool(load("sglang.srt.speculative.dflash_utils", "is_dflash_sampling_verify_available")())
    )
    report.update({"trees": None, "traps": None, "renorm": None, "problem": None})
    if report["gpus"] and ops.get("verify"):
        report["trees"], report["problem"] = attempt(
            lambda: compare_trees(ops["verify"], request["trees"], request["seed"], "cuda")
        )
        if report["problem"] is None:
            report["traps"], report["problem"] = attempt(lambda: probe_traps(ops["verify"], "cuda"))
    if report["gpus"] and ops.get("top_k") and ops.get("top_p"):
        report["renorm"], renorm_problem = attempt(lambda: check_renorm(ops["top_k"], ops["top_p"], "cuda"))
        report["problem"] = report["problem"] or renorm_problem
    return report


def main():
    # The imports of sglang and its kernels print; only our own lines may be on stdout.
    answer = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answer, "w") as out:

        def tell(known):
            out.write(json.dumps(known) + "\n")
            out.flush()

        tell(probe(json.loads(sys.argv[1]), tell))


if __name__ == "__main__":
    main()
