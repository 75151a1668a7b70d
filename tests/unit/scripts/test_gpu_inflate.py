"""A tiny pair in a larger shape says what it said: the same logits, and nothing of the tokens that it lacks."""

import json
import os
import subprocess
from pathlib import Path

from scripts.gpu.inflate_pair import Inflation, Shape, read_tensors
from scripts.rig.server import MODELS

ROOT = Path(__file__).resolve().parents[3]
LARGER = Shape(hidden=512, layers=8, draft_layers=3, heads=12, kv_heads=3, ffn=1280, vocab=1000)
# Run where torch is. Prints the largest difference between logits of the tiny vocabulary, of target and of draft, the
# least margin of those over all others, and the standard deviation of the tiny target's logits.
COMPARE = """
import json, sys, torch
from pathlib import Path
from scripts.gpu.pair_model import Pair, causal_logits

pairs = [Pair(Path(folder), "cpu") for folder in sys.argv[1:]]
vocab = pairs[0].target.config["vocab_size"]
prompts = [[1, *(byte + 4 for byte in text)] for text in (b"import os", b"def main(argv):\\n    ", b"class A(")]
apart, margins, spread = 0.0, [], []
for prompt in prompts:
    one, other = (causal_logits(pair.target, prompt) for pair in pairs)
    apart = max(apart, float((one - other[:vocab]).abs().max()))
    margins.append(float(one.min() - other[vocab:].max()))
    spread.append(float(one.std()))
generator = torch.Generator().manual_seed(0)
ids, features = pairs[0].write(prompts, 24, 0.0, generator)
ids2, features2 = pairs[1].write(prompts, 24, 0.0, generator)
anchors = torch.tensor([12, 20, 27])
one = pairs[0].drafts(ids[1], features[1], anchors)
other = pairs[1].drafts(ids2[1], features2[1], anchors)
margins.append(float(one.min() - other[..., vocab:].max()))
print(json.dumps({
    "target": apart, "draft": float((one - other[..., :vocab]).abs().max()), "margin": min(margins),
    "spread": min(spread), "texts": bool((ids == ids2).all()),
}))
"""


def test_logits_of_the_larger_pair_are_the_tiny_ones(target_venv: Path, tmp_path: Path):
    Inflation(MODELS, tmp_path / "large", LARGER).write()
    done = subprocess.run(
        [target_venv / "bin/python", "-c", COMPARE, MODELS, tmp_path / "large"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["texts"]
    assert found["spread"] > 1
    # Weights are bfloat16 in both; norms' weights are rounded again after their scaling, by at most 2**-9 of each.
    assert found["target"] < 0.1 and found["draft"] < 0.1
    assert found["margin"] > 20


def test_layers_that_are_added_add_nothing_and_yet_compute(tmp_path: Path):
    Inflation(MODELS, tmp_path / "large", LARGER).write()
    tensors = read_tensors(tmp_path / "large/target/model.safetensors")
    added = "model.layers.7."
    assert not tensors[added + "self_attn.o_proj.weight"].any() and not tensors[added + "mlp.down_proj.weight"].any()
    assert tensors[added + "mlp.up_proj.weight"].std() > 0.01
    config = json.loads((tmp_path / "large/target/config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (512, 8, 64)


def test_a_shape_without_room_is_refused(tmp_path: Path):
    try:
        Inflation(MODELS, tmp_path / "large", Shape(hidden=256)).write()
    except ValueError as error:
        assert "hidden_size 256 into 255" in str(error)
    else:
        raise AssertionError("it was not refused")
