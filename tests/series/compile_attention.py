"""Compile the tree's attention for GPUs that are not here, and print what shared memory each variant takes.

Run by a target venv's Python without TRITON_INTERPRET: `compile_attention.py DIRECTORY`, a JSON line a variant.
"""

import importlib.util
import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}  # bytes a block may have
VARIANTS = ((32, 4, 8, 128, 16), (16, 4, 8, 128, 1), (8, 2, 16, 64, 4), (33, 8, 4, 256, 8), (1, 4, 8, 128, 4))


def compiled(kernels, capability, nodes, group, kv_heads, channels, splits):
    """Bytes of shared memory of one variant, in bfloat16."""
    tile = kernels.tile_of(nodes * group, channels, 2, SHARED[capability])
    constants = {
        "N": nodes,
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "CHANNELS": channels,
        "CHANNELS_UP": triton.next_power_of_2(channels),
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "SPLITS": splits,
        "NODES": nodes,
    }
    types = {
        "table_ptr": "*i32",
        "rows_ptr": "*i64",
        "lens_ptr": "*i64",
        "ancestors_ptr": "*u8",
        "parts_ptr": "*fp32",
        "sums_ptr": "*fp32",
        "scale": "fp32",
    }
    names = kernels._attend_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in names
    }
    aligned = [i for i, name in enumerate(names) if name.endswith(("_ptr", "_stride")) and types.get(name) != "*i64"]
    source = ASTSource(
        kernels._attend_kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


def main() -> None:
    path = Path(sys.argv[1]) / "ddtree_attention_kernels.py"
    spec = importlib.util.spec_from_file_location("ddtree_attention_kernels", path)
    kernels = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = kernels
    spec.loader.exec_module(kernels)
    for capability, limit in SHARED.items():
        for variant in VARIANTS:
            shared = compiled(kernels, capability, *variant)
            print(json.dumps({"capability": capability, "variant": variant, "shared": shared, "limit": limit}))


if __name__ == "__main__":
    main()
