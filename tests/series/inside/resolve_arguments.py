"""Run by the target venv's Python: what SGLang says to each of some sets of arguments.

Standard input: a JSON list of objects, each ServerArgs' keyword arguments. Standard output, last line: a JSON list, for
each the error's type and text, or null where the arguments are accepted.
"""

import json
import sys

from sglang.srt.server_args import ServerArgs


def said_to(arguments: dict) -> "list[str] | None":
    try:
        args = ServerArgs(**arguments)
        if hasattr(args, "resolve_once"):  # later releases decide after construction
            args.resolve_once()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


print()
print(json.dumps([said_to(one) for one in json.load(sys.stdin)]))
