"""Write a tiny random target of the DeepSeek-V3 / Kimi K2 family and a DFlash draft: `ROOT/target`, `ROOT/draft`.

    python3 -m scripts.gpu.make_mla_pair ROOT [--seed 1]

Attention has the real MLA sizes (latent 512, rotary 64), which decide the attention kernels; the MoE layers have Kimi
K2's 384 experts in one group, 8 a token and one shared, which decide the gate's kernel. All else is tiny. Byte-level
like the trained pair: token id = byte + 4, 0 is an ordinary id, 1 begin, 2 end, 3 mask.

Random weights give flat logits and a draft that is never right. So dimension 0 of the residual stream is a constant
that no layer writes, and the rows of COMMON tokens in lm_head weigh it: those tokens hold nearly all of the mass, and
target and draft (which borrows embedding and lm_head) agree on the set. Which of them comes next is up to the
layers: a tree over COMMON is accepted one or two deep, samples are diverse, and a wrong mask or wrong KV shows.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, LAYERS, HEADS, EPS = 320, 256, 3, 8, 1e-6
Q_RANK, KV_RANK, NOPE, ROPE, V_DIM = 192, 512, 128, 64, 128
FFN, EXPERTS, TOP_EXPERTS, EXPERT_FFN = 512, 384, 8, 64
# Of 384 random experts some are near-ties at nearly every token, and the rounding of a forward pass of another shape
# exchanges them. What one brings is therefore small beside the shared expert, and seed 1 is one whose texts differ.
EXPERT_GAIN, SHARED_GAIN = 0.05, 2.0
DRAFT_LAYERS, DRAFT_HEADS, DRAFT_KV_HEADS, DRAFT_HEAD_DIM, BLOCK = 2, 4, 2, 64, 8
TARGET_LAYER_IDS = [0, 1]
COMMON = [4 + byte for byte in b"etaoinsr"]
CONSTANT = 8.0  # of dimension 0, where the others have standard deviation 1 before the first layer
COMMON_LOGIT = 12.0  # about how much more a COMMON token's logit is
LOGIT_SPREAD = 2.5  # standard deviation of logits over tokens


class Weights:
    """Named bfloat16 tensors of a model."""

    def __init__(self):
        self.state: dict[str, torch.Tensor] = {}

    def linear(self, name: str, out: int, into: int, gain: float = 1.0, residual: bool = False) -> None:
        """[out, into], for inputs of unit variance: outputs have standard deviation `gain`."""
        weight = torch.randn(out, into) * gain / into**0.5
        if residual:
            weight[0] = 0  # dimension 0 of the residual stream stays as it is
        self.state[f"{name}.weight"] = weight.to(torch.bfloat16)

    def ones(self, name: str, width: int) -> None:
        self.state[f"{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)

    def mlp(self, name: str, width: int, gain: float = 1.0) -> None:
        self.linear(f"{name}.gate_proj", width, HIDDEN, 2.0)
        self.linear(f"{name}.up_proj", width, HIDDEN)
        self.linear(f"{name}.down_proj", HIDDEN, width, gain, residual=True)

    def save(self, folder: Path, config: dict) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def target() -> Weights:
    made = Weights()
    embed = torch.randn(VOCAB, HIDDEN)
    embed[:, 0] = CONSTANT
    made.state["model.embed_tokens.weight"] = embed.to(torch.bfloat16)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        made.linear(f"{attention}.q_a_proj", Q_RANK, HIDDEN)
        made.ones(f"{attention}.q_a_layernorm", Q_RANK)
        made.linear(f"{attention}.q_b_proj", HEADS * (NOPE + ROPE), Q_RANK, 1.5)  # some attention is sharp
        made.linear(f"{attention}.kv_a_proj_with_mqa", KV_RANK + ROPE, HIDDEN)
        made.ones(f"{attention}.kv_a_layernorm", KV_RANK)
        made.linear(f"{attention}.kv_b_proj", HEADS * (NOPE + V_DIM), KV_RANK)
        made.linear(f"{attention}.o_proj", HIDDEN, HEADS * V_DIM, 1.5, residual=True)
        made.ones(f"{layer}.input_layernorm", HIDDEN)
        made.ones(f"{layer}.post_attention_layernorm", HIDDEN)
        if i == 0:
            made.mlp(f"{layer}.mlp", FFN)
            continue
        made.linear(f"{layer}.mlp.gate", EXPERTS, HIDDEN, 2.0)
        made.state[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.randn(EXPERTS) * 0.05
        for expert in range(EXPERTS):
            made.mlp(f"{layer}.mlp.experts.{expert}", EXPERT_FFN, EXPERT_GAIN)
        made.mlp(f"{layer}.mlp.shared_experts", EXPERT_FFN, SHARED_GAIN)
    made.ones("model.norm", HIDDEN)
    made.linear("lm_head", VOCAB, HIDDEN, LOGIT_SPREAD)
    made.state["lm_head.weight"][:, 0] = 0
    # After the last norm dimension 0 is about CONSTANT over the root mean square of all; that one is about 2.
    made.state["lm_head.weight"][COMMON, 0] = COMMON_LOGIT / (CONSTANT / 2)
    return made


def draft() -> Weights:
    made = Weights()
    for i in range(DRAFT_LAYERS):
        attention = f"layers.{i}.self_attn"
        for name, heads in (("q_proj", DRAFT_HEADS), ("k_proj", DRAFT_KV_HEADS), ("v_proj", DRAFT_KV_HEADS)):
            made.linear(f"{attention}.{name}", heads * DRAFT_HEAD_DIM, HIDDEN)
        made.linear(f"{attention}.o_proj", HIDDEN, DRAFT_HEADS * DRAFT_HEAD_DIM, 0.5, residual=True)
        made.ones(f"{attention}.q_norm", DRAFT_HEAD_DIM)
        made.ones(f"{attention}.k_norm", DRAFT_HEAD_DIM)
        made.mlp(f"layers.{i}.mlp", FFN)
        made.ones(f"layers.{i}.input_layernorm", HIDDEN)
        made.ones(f"layers.{i}.post_attention_layernorm", HIDDEN)
    made.linear("fc", HIDDEN, HIDDEN * len(TARGET_LAYER_IDS))
    made.ones("hidden_norm", HIDDEN)
    # The draft knows the set and not the order: a flat guess over COMMON makes a tree of many siblings.
    made.ones("norm", HIDDEN)
    made.state["norm.weight"][1:] = 0.25
    return made


def configs() -> tuple[dict, dict]:
    """Of the target and of the draft."""
    common = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "max_position_embeddings": 4096,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
    }
    of_target = common | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V_DIM,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_EXPERTS,
        "n_shared_experts": 1,
        "moe_intermediate_size": EXPERT_FFN,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 131072,
        "num_nextn_predict_layers": 0,
        "attention_dropout": 0.0,
        "ep_size": 1,
    }
    of_draft = common | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DRAFT_LAYERS,
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": DRAFT_KV_HEADS,
        "head_dim": DRAFT_HEAD_DIM,
        "block_size": BLOCK,
        "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": TARGET_LAYER_IDS},
    }
    return of_target, of_draft


def write(root: Path, seed: int = 1) -> Path:
    """Write both models below `root`; the same seed gives the same bytes."""
    torch.manual_seed(seed)
    of_target, of_draft = configs()
    target().save(root / "target", of_target)
    draft().save(root / "draft", of_draft)
    return root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    write(args.root, args.seed)


if __name__ == "__main__":
    main()
