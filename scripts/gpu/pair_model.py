"""The trained pair in torch alone, float32, for measuring many drafts at once: no server, no KV pool.

It computes what SGLang's Qwen3ForCausalLM and DFlashDraftModel compute for such a checkpoint.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional


class Stack:
    """A folder's layers. `context` is what a layer attends to besides what it is given."""

    def __init__(self, folder: Path, prefix: str, device: str):
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {k: v.float().to(device) for k, v in load_file(str(folder / "model.safetensors")).items()}
        self.prefix, self.device = prefix, device
        c = self.config
        self.heads, self.kv_heads, self.width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

    def weight(self, name: str) -> torch.Tensor:
        return self.weights[f"{self.prefix}{name}.weight"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight(name), self.config["rms_norm_eps"])

    def keys_values(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., T, hidden] -> keys and values [..., T, kv heads, width]."""
        at = f"layers.{layer}.self_attn."
        shape = (*x.shape[:-1], self.kv_heads, self.width)
        k = self.norm((x @ self.weight(at + "k_proj").T).view(shape), at + "k_norm")
        return self._rotate(k, positions), (x @ self.weight(at + "v_proj").T).view(shape)

    def layer(self, layer: int, x: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:
        """One layer. attend(q, k, v) -> what the heads give; q, k, v [..., T, heads or kv heads, width]."""
        at = f"layers.{layer}."
        h = self.norm(x, at + "input_layernorm")
        q = (h @ self.weight(at + "self_attn.q_proj").T).view(*h.shape[:-1], self.heads, self.width)
        q = self._rotate(self.norm(q, at + "self_attn.q_norm"), positions)
        out = attend(q, *self.keys_values(layer, h, positions)).reshape(*x.shape[:-1], -1)
        x = x + out @ self.weight(at + "self_attn.o_proj").T
        h = self.norm(x, at + "post_attention_layernorm")
        gate = functional.silu(h @ self.weight(at + "mlp.gate_proj").T)
        return x + (gate * (h @ self.weight(at + "mlp.up_proj").T)) @ self.weight(at + "mlp.down_proj").T

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        steps = torch.arange(half, device=self.device) / half
        angles = positions[..., None].float() * self.config["rope_theta"] ** -steps
        cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Pair:
    """Attributes: target, draft (Stack), block."""

    def __init__(self, folder: Path, device: str):
        self.device = device
        self.target = Stack(folder / "target", "model.", device)
        self.draft = Stack(folder / "draft", "", device)
        self.block: int = self.draft.config["block_size"]
        self.taken: list[int] = self.draft.config["dflash_config"]["target_layer_ids"]
        self.mask_id: int = self.draft.config["dflash_config"]["mask_token_id"]
        self.head = self.target.weights["lm_head.weight"]

    @torch.inference_mode()
    def write(self, prompts: list[list[int]], tokens: int, temperature: float, generator: torch.Generator):
        """Continue every prompt by `tokens` tokens, plainly.

        Returns: ids int64 [P, L], where row p is prompt p and its text, then padding; features float32
        [P, L, width], what the draft is given of the target at every position but a text's last.
        """
        net, layers = self.target, self.target.config["num_hidden_layers"]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        count, longest = len(prompts), int(lengths.max()) + tokens
        ids = torch.zeros((count, longest), dtype=torch.int64, device=self.device)
        for p, prompt in enumerate(prompts):
            ids[p, : len(prompt)] = torch.tensor(prompt, device=self.device)
        shape = (layers, 2, count, longest, net.kv_heads, net.width)
        cache = torch.zeros(shape, device=self.device)
        features = []
        for t in range(longest - 1):
            x, seen = net.weight("embed_tokens")[ids[:, t]][:, None], []
            position = torch.full((count, 1), t, device=self.device)
            for i in range(layers):

                def attend(q, k, v, i=i, t=t):
                    cache[i, 0, :, t], cache[i, 1, :, t] = k[:, 0], v[:, 0]
                    return _attention(q, cache[i, 0, :, : t + 1], cache[i, 1, :, : t + 1])

                x = net.layer(i, x, position, attend)
                if i in self.taken:
                    seen.append(x[:, 0])
            features.append(torch.cat(seen, -1))
            logits = net.norm(x[:, 0], "norm") @ self.head.T
            if temperature == 0:
                chosen = logits.argmax(-1)
            else:
                shares = (logits / temperature).softmax(-1)
                chosen = torch.multinomial(shares.cpu(), 1, generator=generator)[:, 0].to(self.device)
            own = (t + 1 >= lengths) & (t + 1 < lengths + tokens)
            ids[:, t + 1] = torch.where(own, chosen, ids[:, t + 1])
        return ids, torch.stack(features, 1)

    @torch.inference_mode()
    def drafts(self, ids: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """The draft's logits after each anchor of one text: float32 [A, block - 1, V].

        ids int64 [L]; features [T, width] of its first T tokens; anchors int64 [A], places of last committed tokens.
        """
        net, block = self.draft, self.block
        embed = self.target.weight("embed_tokens")
        places = anchors[:, None] + torch.arange(block, device=self.device)
        block_ids = torch.full_like(places, self.mask_id)
        block_ids[:, 0] = ids[anchors]
        x = embed[block_ids]
        hidden = net.norm(features @ net.weight("fc").T, "hidden_norm")
        context_at = torch.arange(len(features), device=self.device)
        before = context_at < anchors[:, None]  # [A, T]
        sees = torch.cat((before, before.new_ones((len(anchors), block))), 1)
        for i in range(net.config["num_hidden_layers"]):
            context = net.keys_values(i, hidden, context_at)

            def attend(q, k, v, context=context):
                known = (part.expand(len(q), *part.shape) for part in context)
                keys, values = (torch.cat(parts, 1) for parts in zip(known, (k, v), strict=True))
                return _attention(q, keys, values, sees[:, None, None])

            x = net.layer(i, x, places, attend)
        return net.norm(x, "norm")[:, 1:] @ self.head.T


@torch.inference_mode()
def causal_logits(net: Stack, ids: list[int]) -> torch.Tensor:
    """The target's logits after the last of `ids`: float32 [V]."""
    x = net.weight("embed_tokens")[torch.tensor(ids, device=net.device)][None]
    positions = torch.arange(len(ids), device=net.device)[None]
    sees = torch.ones((len(ids), len(ids)), dtype=torch.bool, device=net.device).tril()[None, None]
    for i in range(net.config["num_hidden_layers"]):
        x = net.layer(i, x, positions, lambda q, k, v: _attention(q, k, v, sees))
    return net.norm(x[0, -1], "norm") @ net.weights["lm_head.weight"].T


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """[B, T, heads, width] from keys and values [B, S, kv heads, width]; the mask broadcasts to [B, heads, T, S]."""
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
    )
    return out.transpose(1, 2)
