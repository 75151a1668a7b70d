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
from typing import Any, Protocol, TypeVar

from msgspec import UNSET, UnsetType

from patcher.errors import NotReady
from patcher.typed import Count, Frozen, Misfit, typed

T = TypeVar("T")

QUICK_S = 30.0
ANSWER_LIMIT = 64 << 20  # bytes; the largest that are expected, hundreds of samples with their ids, have a few MiB


class Meta(Frozen):
    """What an answer says of itself. `spec_verify_ct`: verify steps. What is Any here is judged where it is used."""

    completion_tokens: Count | None = None
    spec_verify_ct: Count | None = None
    finish_reason: Any = None
    output_top_logprobs: Any = None


class Answer(Frozen):
    """Of /generate, for one prompt."""

    meta_info: Meta
    output_ids: tuple[int, ...] | None = None
    text: str | None = None


class Tokens(Frozen):
    """Of /tokenize."""

    tokens: tuple[int, ...]


class PatchReport(Frozen):
    """What a patched scheduler says of the files that it runs."""

    identity: str | None


class SchedulerState(Frozen):
    ddtree_patch: PatchReport | None = None


class ServerInfo(Frozen):
    """Of /server_info. `speculative_algorithm` is None without speculation, UNSET where the server does not say."""

    internal_states: tuple[SchedulerState, ...] | None = None
    speculative_algorithm: str | UnsetType | None = UNSET

    @property
    def algorithm(self) -> str | None:
        """None also where the server does not say."""
        return self.speculative_algorithm or None

    @property
    def identities(self) -> set[str | None]:
        """The patch that each scheduler reports; None for one without."""
        patches = [state.ddtree_patch for state in self.internal_states or (SchedulerState(),)]
        return {patch.identity if patch else None for patch in patches}


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
    meta: Meta = field(default_factory=Meta)

    @property
    def finish(self) -> str:
        """Why it ended: `length`, `stop`, `abort`; empty when the server did not say."""
        reason = self.meta.finish_reason
        return str(reason.get("type", "")) if isinstance(reason, Mapping) else str(reason or "")

    @property
    def tokens(self) -> int:
        """How many tokens were generated."""
        return self.meta.completion_tokens or len(self.ids)

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
        return _generation(self._typed("/generate", answer, Answer))

    def generate_batch(self, payload: Mapping[str, Any], *, timeout: float) -> tuple[Generation, ...]:
        """POST /generate of several prompts in one request (`text` or `input_ids` holds a list of prompts)."""
        answers = self._json("POST", "/generate", payload, timeout)
        return tuple(_generation(answer) for answer in self._typed("/generate", answers, tuple[Answer, ...]))

    def tokenize(self, text: str, *, timeout: float = QUICK_S) -> tuple[int, ...] | None:
        """The ids of a text; None where the server has no /tokenize or runs without tokenizer."""
        try:
            return typed(self._json("POST", "/tokenize", {"model": "default", "prompt": text}, timeout), Tokens).tokens
        except (HttpStatus, Misfit):
            return None

    def server_info(self, *, timeout: float = QUICK_S) -> ServerInfo:
        """GET /server_info, or /get_server_info of releases that have only that."""
        try:
            answer = self._json("GET", "/server_info", None, timeout)
        except HttpStatus as error:
            if error.status != 404:
                raise
            answer = self._json("GET", "/get_server_info", None, timeout)
        return self._typed("/server_info", answer, ServerInfo)

    def health(self, *, timeout: float = QUICK_S) -> None:
        """GET /health. Returns when it answers 200; raises ServerProblem otherwise."""
        self._request("GET", "/health", None, timeout)

    def _typed(self, path: str, answer: Any, kind: type[T]) -> T:
        try:
            return typed(answer, kind)
        except Misfit as misfit:
            raise self._broke(path, f"the answer makes no sense: {misfit}") from misfit

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


def _generation(answer: Answer) -> Generation:
    return Generation(text=answer.text, ids=answer.output_ids or (), meta=answer.meta_info)
