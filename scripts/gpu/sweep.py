"""Tokens per verify step on servers: DFLASH, the chain, and trees of some budgets, at three temperatures.

The whole grid is computed from one set of texts by the experiment `acceptance`, which these points check.
"""

import math
import statistics

from scripts.gpu.asking import ask, on_all, prompts
from scripts.gpu.fleet import SERVERS as CATALOGUE
from scripts.gpu.fleet import Run
from scripts.gpu.releases import verify_steps

SERVERS = ("dflash-stock", "dflash", "chain", "b15k4", "tree", "b63k8")
TEMPERATURES = (0.0, 0.6, 1.0)


def run(run: Run) -> dict:
    asked = prompts(run.count(128, 3))
    tokens = run.count(192, 24)

    def measure(temperature: float) -> list[dict]:
        params = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}

        def on_server(ports: list[int]) -> dict:
            infos = [answer["meta_info"] for answer in ask(ports, asked, params, 8)]
            each = [(i["completion_tokens"] - 1) / verify_steps(i) for i in infos]
            steps = sum(verify_steps(i) for i in infos)
            return {
                "steps": steps,
                "accept_length": sum(i["completion_tokens"] - 1 for i in infos) / steps,
                "standard_error": statistics.stdev(each) / math.sqrt(len(each)),
            }

        return [
            {"server": name, "T": temperature, "prompts": len(asked), "tokens": tokens} | row
            for name, row in on_all(run.ports(*SERVERS), on_server).items()
        ]

    found = {"servers": {name: CATALOGUE[name].args for name in SERVERS}}
    return run.steps("sweep", found, {f"T {t}": lambda t=t: measure(t) for t in TEMPERATURES})
