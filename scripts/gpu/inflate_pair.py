"""Embed a tiny trained DFlash pair into the shape of a larger Qwen3: the same texts, the larger one's cost.

    python3 -m scripts.gpu.inflate_pair TINY OUT [--hidden 4096 --layers 36 ...]

TINY and OUT hold target/ and draft/ (config.json and model.safetensors in bfloat16). The defaults are Qwen3-8B's
shape with a draft of five layers: 18 GB, written in some 20 s. What is added changes no logit of the tiny vocabulary:

* Widths are padded with zeros. RMSNorm then divides by a root mean square that is sqrt(tiny / large) of the tiny one's,
  which its weights take back; its epsilon shrinks by the square of that.
* Layers beyond the tiny ones have zero output projections. Their other projections are random, so that a GPU computes
  on numbers as a trained model has them.
* Tokens that the tiny vocabulary lacks get a logit far below all others: every token's embedding holds a small constant
  in one channel that no layer reads or writes, which the last norm lifts and their rows of the head turn negative.

head_dim stays the tiny one's, and with it the rotary frequencies. A query head keeps its key head: heads are laid out
group by group.
"""

import argparse
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CONSTANT, LIFT, SINK = 2.0**-7, 2.0**15, -8.0  # in the embedding, the last norm, the head's rows of unknown tokens
NOISE = 0.02  # standard deviation of the random projections


@dataclass(frozen=True)
class Shape:
    """The larger shape, by the names of a Qwen3 config."""

    hidden: int = 4096
    layers: int = 36
    draft_layers: int = 5
    heads: int = 64
    kv_heads: int = 16
    ffn: int = 12288
    vocab: int = 151936
    positions: int = 40960


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float -> uint16 that holds bfloat16, rounded to the nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """A safetensors file of bfloat16 as float32 arrays; raises ValueError on another type."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {entry['dtype']}, not BF16")
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        halves = np.frombuffer(data[begin:end], np.uint16)
        found[name] = (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
    return found


class Tensors:
    """A safetensors file of bfloat16 being written. What is never set stays zero, and a hole in the file."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]):
        header: dict = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
        self._path, self._base, self._header = path, 8 + len(text), header

    def halves(self, name: str) -> np.memmap:
        """The tensor as uint16 that hold bfloat16, to write to."""
        entry = self._header[name]
        return np.memmap(self._path, np.uint16, "r+", self._base + entry["data_offsets"][0], tuple(entry["shape"]))

    def set(self, name: str, values: np.ndarray | float, *where: slice) -> None:
        """Set `where` of a tensor (its first rows, columns, ... by default) to float values."""
        values = np.asarray(values, np.float32)
        place = where or tuple(slice(0, size) for size in values.shape)
        self.halves(name)[place] = to_bfloat16(values)


class Inflation:
    """One pair on its way into a larger shape."""

    def __init__(self, tiny: Path, out: Path, shape: Shape):
        self.tiny, self.out, self.shape = tiny, out, shape
        self._random = np.random.default_rng(0)
        self._noise: dict[tuple[int, ...], np.ndarray] = {}

    def write(self) -> None:
        """Raises ValueError where the tiny pair does not fit into the shape."""
        for which, layers in (("target", self.shape.layers), ("draft", self.shape.draft_layers)):
            config = json.loads((self.tiny / which / "config.json").read_text())
            self._check(config, layers)
            folder = self.out / which
            folder.mkdir(parents=True, exist_ok=True)
            self._write_tensors(which, config, layers, folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(self._config(which, config, layers), indent=1) + "\n")

    def _check(self, config: dict, layers: int) -> None:
        shape, group = self.shape, config["num_attention_heads"] // config["num_key_value_heads"]
        room = {
            "hidden_size": shape.hidden - 1,  # one channel for the constant
            "num_hidden_layers": layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.ffn,
            "vocab_size": shape.vocab,
        }
        small = [f"{key} {config[key]} into {most}" for key, most in room.items() if config[key] > most]
        if small or group > shape.heads // shape.kv_heads:
            raise ValueError(f"the tiny pair does not fit: {', '.join(small) or 'query heads of a key head'}")

    def _config(self, which: str, tiny: dict, layers: int) -> dict:
        shape = self.shape
        larger = {
            "hidden_size": shape.hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.ffn,
            "vocab_size": shape.vocab,
            "max_position_embeddings": shape.positions,
            "rms_norm_eps": tiny["rms_norm_eps"] * tiny["hidden_size"] / shape.hidden,
        }
        return tiny | larger | ({"num_target_layers": shape.layers} if which == "draft" else {})

    def _write_tensors(self, which: str, config: dict, layers: int, path: Path) -> None:
        shape, tiny = self.shape, read_tensors(self.tiny / which / "model.safetensors")
        width, head_dim = config["hidden_size"], config["head_dim"]
        prefix = "model." if which == "target" else ""
        taken = tiny["fc.weight"].shape[1] // width if which == "draft" else 0  # target layers that the draft sees
        shapes = {}
        for layer in range(layers):
            shapes |= _layer_shapes(f"{prefix}layers.{layer}.", shape, head_dim)
        shapes[prefix + "norm.weight"] = (shape.hidden,)
        if which == "target":
            shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (shape.vocab, shape.hidden))
        else:
            shapes |= {"fc.weight": (shape.hidden, taken * shape.hidden), "hidden_norm.weight": (shape.hidden,)}
        tensors = Tensors(path, shapes)
        for layer in range(layers):
            name = f"{prefix}layers.{layer}."
            if layer < config["num_hidden_layers"]:
                self._embed_layer(tensors, name, tiny, config)
            else:
                self._fill_layer(tensors, name, shapes)
        norm_scale, extra = (width / shape.hidden) ** 0.5, slice(width, width + 1)
        tensors.set(prefix + "norm.weight", tiny[prefix + "norm.weight"] * norm_scale)
        tensors.set(prefix + "norm.weight", LIFT, extra)
        if which == "target":
            vocab = config["vocab_size"]
            tensors.set("model.embed_tokens.weight", tiny["model.embed_tokens.weight"])
            tensors.set("model.embed_tokens.weight", CONSTANT, slice(None), extra)
            tensors.set("lm_head.weight", tiny["lm_head.weight"])
            tensors.set("lm_head.weight", SINK, slice(vocab, None), extra)
            return
        for layer in range(taken):
            columns = slice(layer * shape.hidden, layer * shape.hidden + width)
            part = tiny["fc.weight"][:, layer * width : (layer + 1) * width]
            tensors.set("fc.weight", part, slice(0, width), columns)
        tensors.set("hidden_norm.weight", tiny["hidden_norm.weight"] * norm_scale)

    def _embed_layer(self, tensors: Tensors, name: str, tiny: dict, config: dict) -> None:
        shape, width, head_dim = self.shape, config["hidden_size"], config["head_dim"]
        heads = config["num_attention_heads"]
        group, larger_group = heads // config["num_key_value_heads"], shape.heads // shape.kv_heads
        attention = name + "self_attn."
        for head in range(heads):
            here = slice(head * head_dim, (head + 1) * head_dim)
            slot = head // group * larger_group + head % group  # a key head's queries lie beside each other
            there = slice(slot * head_dim, (slot + 1) * head_dim)
            tensors.set(attention + "q_proj.weight", tiny[attention + "q_proj.weight"][here], there, slice(0, width))
            tensors.set(attention + "o_proj.weight", tiny[attention + "o_proj.weight"][:, here], slice(0, width), there)
        as_it_is = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm", "self_attn.k_norm")
        for part in (*as_it_is, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            tensors.set(f"{name}{part}.weight", tiny[f"{name}{part}.weight"])
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors.set(f"{name}{part}.weight", tiny[f"{name}{part}.weight"] * (width / shape.hidden) ** 0.5)

    def _fill_layer(self, tensors: Tensors, name: str, shapes: dict) -> None:
        """A layer that computes much and adds nothing."""
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            tensor = f"{name}{part}.weight"
            size = shapes[tensor]
            if size not in self._noise:
                self._noise[size] = to_bfloat16(self._random.standard_normal(size, np.float32) * np.float32(NOISE))
            tensors.halves(tensor)[:] = self._noise[size]
        for part in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            tensor = f"{name}{part}.weight"
            tensors.set(tensor, np.ones(shapes[tensor]))


def _layer_shapes(name: str, shape: Shape, head_dim: int) -> dict[str, tuple[int, ...]]:
    queries, keys = shape.heads * head_dim, shape.kv_heads * head_dim
    sizes = {
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.ffn),
        "input_layernorm": (shape.hidden,),
        "post_attention_layernorm": (shape.hidden,),
    }
    return {f"{name}{part}.weight": size for part, size in sizes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiny", type=Path)
    parser.add_argument("out", type=Path)
    for name, value in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = vars(parser.parse_args())
    Inflation(args.pop("tiny"), args.pop("out"), Shape(**args)).write()


if __name__ == "__main__":
    main()
