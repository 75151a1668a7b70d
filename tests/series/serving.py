"""Real servers on the CPU with the trained pair, and what they are asked."""

import http.client
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from scripts.rig.server import MODELS, CpuServer, token_ids

# Python source, as the pair was trained on; of many lengths, so that batches are ragged.
PROMPTS = [
    b"def parse_args(self, args=None):\n",
    b"import os\nimport sys\n",
    b"class Foo(object):\n    def __init__",
    b"for i in range",
    b'    raise ValueError("',
    b"def main():\n    parser = argparse.ArgumentParser(\n        description=",
    b"if __name__ == ",
    b"    def test_read(self):\n        with open(self.path) as f:\n            self.assert",
    b"try:\n    import json\nexcept ImportError:\n",
    b"x",
    b"    @property\n    def name(self):\n        return self._name\n\n    @name.setter\n    def name(self, value):\n",
    b"from collections import namedtuple\n\nPoint = namedtuple('Point', 'x y')\n\ndef distance(a, b):\n    return ",
]
REFERENCE_EXTRA = ("--max-running-requests", "16")
# A check of the KV pool whenever the server is idle ends the server instead of being logged.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}


def make_pair_with_tokenizer(directory: Path) -> Path:
    """The trained pair with its encoding written down as a tokenizer, which stop strings need."""
    for name in ("target", "draft"):
        shutil.copytree(MODELS / name, directory / name)
    special = ["<pad>", "<s>", "</s>", "<mask>"]
    vocabulary = {token: number for number, token in enumerate(special)}
    vocabulary |= {character: byte + 4 for byte, character in enumerate(_byte_characters())}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, token in enumerate(special)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "target/tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "target/tokenizer_config.json").write_text(json.dumps(config))
    return directory


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(0x100)]


class Server(CpuServer):
    """A CpuServer with more ways to ask."""

    def __init__(self, venv: Path, log: Path, *, environment: Mapping[str, str] | None = None, **settings):
        """`environment`: more of it. For the rest see CpuServer."""
        with patch.dict(os.environ, STRICT | (environment or {})):
            super().__init__(venv, log, **settings)

    def ask(self, body: dict, timeout: float = 300) -> tuple[int, object]:
        """/generate: (status, parsed answer)."""
        status, answer = self.request("POST", "/generate", body, timeout=timeout)
        return status, json.loads(answer)

    def flush(self) -> None:
        """Empty the radix cache, which is refused while a request runs, and that may be an answered one."""
        deadline = time.monotonic() + 60
        while self.request("POST", "/flush_cache")[0] != 200:
            assert time.monotonic() < deadline, "a request is still running"
            threading.Event().wait(0.5)

    def greedy(self, prompt: bytes, tokens: int = 48) -> dict:
        return self.generate(prompt, temperature=0, max_new_tokens=tokens, ignore_eos=True)

    def together(self, prompts: Sequence[bytes], sampling: Sequence[dict], clients: int) -> list[dict]:
        """One request for each prompt, `clients` at a time."""
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(lambda pair: self.generate(pair[0], **pair[1]), zip(prompts, sampling, strict=True)))

    def many(self, prompt: bytes, sampling: list[dict]) -> list[list[int]]:
        """The same prompt in one HTTP request, once for each of `sampling`: output ids in that order."""
        body = {"input_ids": [token_ids(prompt)] * len(sampling), "sampling_params": sampling}
        status, answers = self.ask(body, timeout=600)
        assert status == 200, answers
        return [answer["output_ids"] for answer in answers]

    @contextmanager
    def under_way(self, body: dict) -> Iterator[http.client.HTTPResponse]:
        """A streamed /generate that has given its first token. Leaving the block hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/generate", json.dumps(body | {"stream": True}), headers)
            response = connection.getresponse()
            assert response.status == 200 and response.readline().startswith(b"data:")
            yield response
        finally:
            connection.close()

    def healthy(self) -> bool:
        """SGLang never answers a /health that comes just as its last batch ends; the next one it does."""
        return any(self.request("GET", "/health")[0] == 200 for _ in range(2))


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Wait until all are ready; end them at the end."""
    try:
        for server in servers:
            server.wait_ready()
        yield
    finally:
        for server in servers:
            server.stop()
