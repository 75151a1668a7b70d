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


def missing_in_plugins() -> list[str]:
    """What SGLang asks of any algorithm by `is_...` and an algorithm that a plugin registers does not have."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    try:
        from sglang.srt.speculative.spec_registry import CustomSpecAlgo
    except ImportError:  # 0.5.11 takes no algorithms from plugins
        return []
    asked = [name for name in vars(SpeculativeAlgorithm) if name.startswith("is_")]
    return [name for name in asked if not hasattr(CustomSpecAlgo, name)]


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    answers = {name: resolved(arguments) for name, arguments in cases.items()}
    sys.stdout.write(json.dumps(answers | {"missing in plugins": missing_in_plugins()}) + "\n")
