"""What the arguments of a server become, or why they are refused. For the target venv's Python.

Reads lists of arguments as JSON, by name; prints for each either {"refused": sentence} or the numbers that resolved.
"""

import json
import sys

from sglang.srt.server_args import prepare_server_args

NUMBERS = ("speculative_num_draft_tokens", "speculative_dflash_block_size", "speculative_ddtree_topk")


def resolved(arguments: list[str]) -> dict:
    try:
        args = prepare_server_args(arguments)
        if hasattr(args, "resolve_once"):  # elsewhere construction resolves
            args.resolve_once()
    except (ValueError, AssertionError) as refusal:
        return {"refused": str(refusal)}
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:  # resolution writes the fields
        return {name: getattr(args, name) for name in NUMBERS}
    return {name: getattr(resolving_view(args), name) for name in NUMBERS}


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps({name: resolved(arguments) for name, arguments in cases.items()}) + "\n")
