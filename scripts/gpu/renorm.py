"""Does the release's top-p renormalisation end? On rows as top-k 20 leaves them of nearly flat logits.

`sgl_kernel.top_p_renorm_prob` is FlashInfer's. Below 2,048 columns that searches a threshold by thirds of an interval
until one value is left in it; where two probabilities are neighbouring floats the thirds can round to the interval's
own ends, which then never move. The release calls it on the top-k rows of a request with top-k and top-p. A process of
its own, since what does not end cannot be interrupted.
"""

import os
import subprocess

from scripts.gpu.fleet import ROOT, Run
from scripts.gpu.server import ENVIRONMENT

ROWS, VOCABULARY, TOP_K, TOP_P = 256, 151_936, 20, 0.95
SPREADS = (1.0, 1e-2, 1e-4, 2e-5, 1e-5, 3e-6, 1e-6)  # standard deviations of the logits
STOPS = 180.0  # seconds for all of them, the import of torch and 77 to 92 s of nvcc included
MEANWHILE = True  # needs no server


def run(run: Run) -> dict:
    """{"ended": [spreads], "did not end": spread or None, ...}, with the release's environment."""
    child = subprocess.Popen(
        [str(run.python("stock")), "-m", "scripts.gpu.renorm"],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        output, _ = child.communicate(timeout=STOPS)
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
    if child.returncode > 0:
        raise RuntimeError(f"the process ended with {child.returncode}")
    words = [line.split() for line in output.splitlines()]
    ended = [float(spread) for what, spread in words if what == "ended"]
    begun = [float(spread) for what, spread in words if what == "begun"]
    return {
        "rows": ROWS,
        "columns": TOP_K,
        "top_p": TOP_P,
        "seconds": STOPS,
        "ended": ended,
        "did not end": begun[-1] if len(begun) > len(ended) else None,
    }


def main() -> None:
    import torch  # in the process of its own only
    from sgl_kernel import top_p_renorm_prob

    generator = torch.Generator("cuda").manual_seed(0)
    top_p = torch.full((ROWS,), TOP_P, device="cuda")
    for spread in SPREADS:
        logits = torch.randn(ROWS, VOCABULARY, device="cuda", generator=generator).mul_(spread).bfloat16().float()
        rows = torch.softmax(torch.topk(logits, TOP_K, dim=-1).values, dim=-1)
        torch.cuda.synchronize()
        print("begun", spread, flush=True)
        top_p_renorm_prob(rows, top_p)
        torch.cuda.synchronize()
        print("ended", spread, flush=True)


if __name__ == "__main__":
    main()
