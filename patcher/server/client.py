"""The HTTP of one SGLang server, over any connection to its host.

Each call opens its own socket (`Connection.open_socket`), so calls may be made from several threads and a server that
is bound to the host's loopback is reached through SSH. Nothing is streamed: what is checked is the finished answer.

Every failure is a ServerProblem: HttpStatus (an answer that is not 200), ServerRefused (nobody listens), ServerTimeout
(connected, but no whole answer in time), ServerBroke (the connection ended early, or the answer makes no sense). A
lost connection to the host itself is the connection's own HostUnreachable and passes through.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from patcher.errors import NotReady
from patcher.wire.shapes import COUNT, problem

QUICK_S = 30.0
ANSWER_LIMIT = 64 << 20  # bytes; the largest that are expected, hundreds of samples with their ids, have a few MiB
_TEXT = (str, None)
_ANSWER = {"meta_info": {}}
_COUNTS = ("completion_tokens", "spec_verify_ct")
_INFO = {"internal_states": ([{}], None)}
_PATCH = (None, {"identity": _TEXT})


class SocketOpener(Protocol):
    """The one thing this needs of a Connection."""

    def open_socket(self, host: str, port: int) -> Any: ...


class ServerProblem(NotReady):
    """The server did not give a proper answer."""


class ServerRefused(ServerProblem):
    """Nobody listens on the server's port."""


class ServerTimeout(ServerProblem):
    """The server took the request and did not answer it in time."""


class ServerBroke(ServerProblem):
    """The server ended the connection early, or answered something that is not its protocol."""


class HttpStatus(ServerProblem):
    """The server answered with another status than 200."""

    def __init__(self, status: int, body: str, *, where: str) -> None:
        super().__init__(
            f"the server answered HTTP {status}: {' '.join(body.split())[:300] or '(no text)'}",
            where=where,
            next_step="see the server's log",
            detail=body[:4000],
        )
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Generation:
    """One finished answer. `ids` are the new tokens ([] when the server sent none), `text` None without tokenizer."""

    text: str | None
    ids: tuple[int, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finish(self) -> str:
        """Why it ended: `length`, `stop`, `abort`; empty when the server did not say."""
        reason = self.meta.get("finish_reason")
        return str(reason.get("type", "")) if isinstance(reason, Mapping) else str(reason or "")

    @property
    def tokens(self) -> int:
        """How many tokens were generated."""
        return int(self.meta.get("completion_tokens") or len(self.ids))

    @property
    def output(self) -> tuple[int, ...] | str:
        """What two answers are compared by: token ids when there are any, else the text."""
        return self.ids if self.ids else (self.text or "")


class SglangClient:
    """Calls to one server. `timeout` arguments are seconds for the whole of one call's next byte."""

    def __init__(self, connection: SocketOpener, host: str, port: int, api_key: str | None = None) -> None:
        self.connection = connection
        self.host = host
        self.port = port
        self._api_key = api_key

    @property
    def where(self) -> str:
        return f"http://{self.host}:{self.port}"

    def generate(self, payload: Mapping[str, Any], *, timeout: float) -> Generation:
        """POST /generate of one prompt."""
        answer = self._json("POST", "/generate", payload, timeout)
        if not isinstance(answer, dict):
            raise self._broke("/generate", f"expected one object, got {type(answer).__name__}")
        return self._generation(answer)

    def generate_batch(self, payload: Mapping[str, Any], *, timeout: float) -> tuple[Generation, ...]:
        """POST /generate of several prompts in one request (`text` or `input_ids` holds a list of prompts)."""
        answers = self._json("POST", "/generate", payload, timeout)
        if not isinstance(answers, list):
            raise self._broke("/generate", f"expected a list, got {type(answers).__name__}")
        return tuple(self._generation(answer) for answer in answers)

    def tokenize(self, text: str, *, timeout: float = QUICK_S) -> tuple[int, ...] | None:
        """The ids of a text; None where the server has no /tokenize or runs without tokenizer."""
        try:
            answer = self._json("POST", "/tokenize", {"model": "default", "prompt": text}, timeout)
        except HttpStatus:
            return None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            return None
        return tuple(tokens)

    def server_info(self, *, timeout: float = QUICK_S) -> dict[str, Any]:
        """GET /server_info, or /get_server_info of releases that have only that."""
        try:
            answer = self._json("GET", "/server_info", None, timeout)
        except HttpStatus as error:
            if error.status != 404:
                raise
            answer = self._json("GET", "/get_server_info", None, timeout)
        wrong = problem(answer, {}) or problem({"internal_states": None, **answer}, _INFO)
        states = () if wrong else answer.get("internal_states") or ()
        wrong = wrong or next(filter(None, (problem(state.get("ddtree_patch"), _PATCH) for state in states)), "")
        wrong = wrong or problem(answer.get("speculative_algorithm"), _TEXT)
        if wrong:
            raise self._broke("/server_info", f"the answer makes no sense: {wrong}")
        return answer

    def health(self, *, timeout: float = QUICK_S) -> None:
        """GET /health. Returns when it answers 200; raises ServerProblem otherwise."""
        self._request("GET", "/health", None, timeout)

    def _generation(self, answer: Any) -> Generation:
        wrong = problem(answer, _ANSWER)
        if not wrong:
            meta, ids, text = answer["meta_info"], answer.get("output_ids") or [], answer.get("text")
            wrong = problem(ids, [int]) or problem(text, _TEXT)
            wrong = wrong or next(filter(None, (problem(meta.get(name), (COUNT, None)) for name in _COUNTS)), "")
        if wrong:
            raise self._broke("/generate", f"the answer makes no sense: {wrong}")
        return Generation(text=text, ids=tuple(ids), meta=meta)

    def _json(self, method: str, path: str, payload: Mapping[str, Any] | None, timeout: float) -> Any:
        body = self._request(method, path, payload, timeout)
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise self._broke(path, f"the answer is not JSON: {self._without_key(repr(body[:80]))}") from error

    def _request(self, method: str, path: str, payload: Mapping[str, Any] | None, timeout: float) -> bytes:
        where = f"{method} {self.where}{path}"
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        body = None
        if payload is not None:
            body = json.dumps(payload).encode()
            headers["Content-Type"] = "application/json"
        channel = None
        # The socket comes ready-made: http.client must not open one of its own on this machine.
        http_connection = http.client.HTTPConnection(self.host, self.port)
        try:
            channel = self.connection.open_socket(self.host, self.port)
            channel.settimeout(timeout)
            http_connection.sock = channel
            http_connection.request(method, path, body=body, headers=headers)
            response = http_connection.getresponse()
            data = response.read(ANSWER_LIMIT + 1)
        except ConnectionRefusedError as error:
            raise ServerRefused(
                f"nobody listens on port {self.port}",
                where=where,
                next_step="start the server, or correct endpoint.port",
            ) from error
        except TimeoutError as error:
            raise ServerTimeout(
                f"no answer within {timeout:.0f} s", where=where, next_step="see the server's log"
            ) from error
        except (OSError, EOFError, http.client.HTTPException) as error:
            raise self._broke(path, f"the connection broke: {type(error).__name__}: {error}") from error
        finally:
            http_connection.close()
            if channel is not None:
                channel.close()
        if len(data) > ANSWER_LIMIT:
            raise self._broke(path, f"the answer has more than {ANSWER_LIMIT >> 20} MiB")
        if response.status != 200:
            raise HttpStatus(response.status, self._without_key(data.decode("utf-8", "replace")), where=where)
        return data

    def _without_key(self, text: str) -> str:
        """What the server says, which may repeat the key that it was sent."""
        return text.replace(self._api_key, "***") if self._api_key else text

    def _broke(self, path: str, why: str) -> ServerBroke:
        return ServerBroke(why, where=f"{self.where}{path}", next_step="see the server's log")
