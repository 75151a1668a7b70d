"""Prompts for the trained pair, and ways to ask servers for many texts at once.

The pair is byte-level (token id = byte + 4, 1 begins), so prompts are slices of the standard library's sources.
`ports` of one server are its replicas: what is asked is spread over them.
"""

import contextlib
import queue
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.gpu.server import generate


def tokens_of(text: bytes) -> list[int]:
    return [1, *(byte + 4 for byte in text)]


def prompts(count: int, length: int = 96) -> list[list[int]]:
    """Prompts of different places and lengths (half of `length` up to all of it), the same on every call."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(
        (root / name).read_bytes()
        for name in ("argparse.py", "tarfile.py", "typing.py", "pathlib.py")
        if (root / name).is_file()
    )
    step = (len(text) - length) // count
    return [tokens_of(text[i * step : i * step + length // 2 + i % (length // 2)]) for i in range(count)]


def long_text(length: int, number: int) -> list[int]:
    """`length` tokens of source text, one of many places by `number`, the same on every call; none where length < 1."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(root.glob("[a-h]*.py")))
    begin = number * 10_007 % max(1, len(text) - length)
    return tokens_of(text[begin : begin + length - 1]) if length > 0 else []


def ask(ports: Sequence[int], asked: list[list[int]], params: dict, concurrency: int) -> list[dict]:
    """One request a prompt, `concurrency` in flight at each replica; answers in the prompts' order."""
    answers: list[dict | None] = [None] * len(asked)
    waiting = queue.SimpleQueue()
    for i in range(len(asked)):
        waiting.put(i)

    def client(port: int) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                i = waiting.get_nowait()
                (answers[i],) = generate(port, asked[i], params)

    with ThreadPoolExecutor(concurrency * len(ports)) as pool:
        for done in [pool.submit(client, port) for port in ports for _ in range(concurrency)]:
            done.result()
    return answers


def on_all(servers: dict[str, list[int]], action) -> dict:
    """{name: action(ports)} for all servers at once."""
    with ThreadPoolExecutor(len(servers)) as pool:
        running = {name: pool.submit(action, ports) for name, ports in servers.items()}
        return {name: future.result() for name, future in running.items()}


def sample_many(ports: Sequence[int], prompt: list[int], params: dict | list, count: int, batch: int = 256) -> list:
    """`count` completions (tuples of ids) of one prompt, `batch` a request, two requests in flight a replica.

    params: of every request of a batch, or a list of `batch` of them.
    """
    sizes = [min(batch, count - begin) for begin in range(0, count, batch)]

    def one(job: tuple[int, int]) -> list[tuple]:
        number, size = job
        asked = params if isinstance(params, dict) else params[:size]
        answers = generate(ports[number % len(ports)], [prompt] * size, asked)
        return [tuple(answer["output_ids"]) for answer in answers]

    with ThreadPoolExecutor(2 * len(ports)) as pool:
        return [text for texts in pool.map(one, enumerate(sizes)) for text in texts]
