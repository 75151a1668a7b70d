"""Tensor parallel 2: do both ranks commit the same path at every step, and are texts what one GPU gives?

Both ranks of two servers (one decides by the op, the other by sample-and-follow and without SGLang's own all-reduce)
write a digest of what they are about to commit, see trace_paths.py. The load is mixed: greedy and sampled requests,
alone and in batches, coming and going. Then sampled texts and greedy ones against plain decoding on one GPU, and a
rank that is made to commit another token, which the comparison has to notice.
"""

import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.gpu.asking import ask, on_all, prompts, sample_many
from scripts.gpu.exact import two_sample
from scripts.gpu.fleet import PAIR, Run, tree
from scripts.gpu.greedy import differences
from scripts.gpu.mla import NEAR_TIE
from scripts.gpu.releases import verify_steps
from scripts.gpu.sampled import PROMPT
from scripts.gpu.server import GpuServer, generate

SERVERS = ("plain", "tree")  # on one GPU
STEPS = 2000  # to compare, on each server
# SGLang's defaults but for what some hosts must not use.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
ON_CPU = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # two ranks on one CPU
SAMPLING = (
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.0},
)
LEAST_P = 0.001


OWN = {  # server: environment, arguments
    "tp2-tree": ("patched", []),
    "tp2-tree-follow": ("follow", ["--disable-custom-all-reduce"]),
}


def launch(run: Run) -> None:
    for name, (venv, more) in OWN.items():
        folder = _traces(run, name)
        folder.mkdir(exist_ok=True)
        python = _traced(run.python(venv).parents[1], run.args.work.absolute() / f"{name}-venv")
        env = ENVIRONMENT | {"DDTREE_TRACE_DIR": str(folder)} | (ON_CPU if run.rehearsal else {})
        args = [*run.small, *tree(32, 8), "--tp-size", "2", *more]
        run.start(name, python, PAIR / "target", args, env)


def _traces(run: Run, name: str) -> Path:
    return run.args.work.absolute() / f"{name}-trace"


def run(run: Run) -> dict:
    run.ports(*OWN)  # that they run
    servers = {name: run.servers[name][0] for name in OWN}
    folders = {server.port: _traces(run, name) for name, server in servers.items()}
    asked = prompts(run.count(64, 4))
    found = {
        "servers": {name: server.command()[1:] for name, server in servers.items()},
        "thresholds": {"steps": run.count(STEPS, 60), "differing steps": 0, "near_tie": NEAR_TIE, "p": LEAST_P},
    }
    steps = {
        "paths": lambda: on_all(
            {name: [server.port] for name, server in servers.items()},
            lambda ports: _paths(run, ports[0], folders[ports[0]], asked, run.count(STEPS, 60)),
        ),
        "exact": lambda: _exact(run, servers),
        "greedy": lambda: _greedy(run, servers, asked),
        "paths, all": lambda: {name: _compare(folders[server.port]) for name, server in servers.items()},
        # Last: afterwards the ranks of a server have other texts, and it is of no use any more.
        "a rank that commits another token": lambda: [
            _control(name, server.port, folders[server.port], asked[0]) for name, server in servers.items()
        ],
    }
    return run.steps("tp2", found, steps)


def _traced(venv: Path, copy: Path) -> Path:
    """A copy of the environment whose ranks write what they commit; gives its interpreter."""
    if not copy.exists():
        subprocess.run(["cp", "-a", venv, copy], check=True)
        site = next(copy.glob("lib/python3*/site-packages"))
        shutil.copyfile(Path(__file__).with_name("trace_paths.py"), site / "ddtree_trace_paths.py")
        # Last in the alphabet: after whatever makes the other imports possible.
        (site / "zzz_ddtree_trace_paths.pth").write_text("import ddtree_trace_paths\n")
    return copy / "bin" / "python"


def _paths(run: Run, port: int, folder: Path, asked: list[list[int]], steps: int) -> dict:
    """Ask until the ranks have committed `steps` steps, alone and in batches, then compare."""
    rng = random.Random(0)

    def client(width: int) -> int:
        spent = 0
        for _ in range(4):
            params = rng.choice(SAMPLING) | {"max_new_tokens": rng.randrange(8, run.count(160, 24)), "ignore_eos": True}
            batch = [rng.choice(asked) for _ in range(rng.choice((1, 1, 3)) if width > 1 else 1)]
            spent += sum(verify_steps(a["meta_info"]) for a in generate(port, batch, params))
        return spent

    requests_steps, widths = 0, []
    while not widths or len(_lines(folder, 0)) < steps:
        width = (1, 4, 2, 9, 1, 16, 3)[len(widths) % 7]
        widths.append(width)
        with ThreadPoolExecutor(width) as pool:
            requests_steps += sum(pool.map(client, [width] * width))
    return {"widths": widths, "request_steps": requests_steps} | _compare(folder)


def _lines(folder: Path, rank: int) -> list[str]:
    return (folder / f"rank{rank}.txt").read_text().split("\n")[:-1]


def _compare(folder: Path) -> dict:
    """Step by step. Read while no request runs: both ranks have then written all."""
    one, other = (_lines(folder, rank) for rank in (0, 1))
    differing = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    batches: dict[int, int] = {}
    for line in one:
        bs = int(line.split()[0])
        batches[bs] = batches.get(bs, 0) + 1
    return {
        "steps": [len(one), len(other)],
        "distinct": len(set(one)),  # that the digests say something
        "differing": len(differing),
        "first_differing": [{"step": i, "ranks": [one[i], other[i]]} for i in differing[:5]],
        "steps_by_batch": {str(bs): batches[bs] for bs in sorted(batches)},
        "passed": not differing and len(one) == len(other),
    }


def _control(name: str, port: int, folder: Path, prompt: list[int]) -> dict:
    """Is a difference between the ranks noticed? One of them is told to commit another token."""
    before = len(_lines(folder, 0))
    (folder / "ALTER").touch()
    generate(port, [prompt], {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}, timeout=60)
    one, other = (_lines(folder, rank)[before:] for rank in (0, 1))
    differing = sum(a != b for a, b in zip(one, other, strict=False))
    return {"server": name, "steps": len(one), "differing": differing, "passed": differing == len(one) > 0}


def _greedy(run: Run, servers: dict[str, GpuServer], asked: list[list[int]]) -> list[dict]:
    """Against plain decoding on one GPU; the tree on one GPU against it is the yardstick."""
    ports = run.ports("plain", "tree") | {name: [server.port] for name, server in servers.items()}
    params = {"temperature": 0, "max_new_tokens": run.count(128, 16), "ignore_eos": True}
    rows = []
    for batch, some in ((8, asked), (1, asked[:24])):  # one after the other takes long
        texts = on_all(ports, lambda p, b=batch, q=some: [a["output_ids"] for a in ask(p, q, params, b)])
        for one, other in (("tree", "plain"), *((n, o) for n in servers for o in ("plain", "tree"))):
            row = {"server": one, "against": other, "batch": batch, "prompts": len(some)}
            row |= differences(ports["plain"][0], some, texts[one], texts[other])
            rows.append(row | {"passed": all(p["margin"] < NEAR_TIE for p in row["parted"])})
    return rows


def _exact(run: Run, servers: dict[str, GpuServer]) -> list[dict]:
    samples = run.count(20_000, 200)
    ports = run.ports("plain") | {name: [server.port] for name, server in servers.items()}
    rows = []
    # A min-p that no token is near: see rounding.py.
    for cell, more in (("T 1.0", {"temperature": 1.0}), ("T 0.6, min_p 0.15", {"temperature": 0.6, "min_p": 0.15})):
        params = {"max_new_tokens": 3, "ignore_eos": True} | more
        texts = on_all(ports, lambda p, q=params: sample_many(p, PROMPT, q, samples, batch=run.count(256, 50)))
        for name in servers:
            found = two_sample(texts[name], texts["plain"])
            row = {"server": name, "against": "plain on one GPU", "cell": cell, "n": samples}
            rows.append(row | found | {"passed": found["p"] > LEAST_P / 4})  # four tests
    return rows
