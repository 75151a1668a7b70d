"""What the experiments on sampling ask: one prompt, a few tokens, and the settings that are compared."""

from scripts.gpu.asking import tokens_of

PROMPT = tokens_of(b"import os\nimport ")  # many continuations: power against small biases
TOKENS = 3
CELLS = {
    "plain": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20": {"top_k": 20},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 20, top_p 0.9": {"top_k": 20, "top_p": 0.9},
}
CLEAR = {"min_p": 0.15}  # at T 0.6 no token is near this cut: `python3 -m scripts.gpu.rounding`
