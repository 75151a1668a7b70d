"""The HTTP client against stub servers that misbehave."""

import contextlib
import socket
import threading

import pytest

from patcher.errors import NotReady
from patcher.server.client import (
    HttpStatus,
    ServerBroke,
    ServerInfo,
    ServerProblem,
    ServerRefused,
    ServerTimeout,
    SglangClient,
)
from patcher.ssh.connection import LocalConnection
from tests.support.stub_sglang import StubServer

GREEDY = {"temperature": 0.0, "max_new_tokens": 5}


def client_of(port, api_key=None):
    return SglangClient(LocalConnection(), "127.0.0.1", port, api_key)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def raw_stub(answer, close=True):
    """A stub that accepts one connection and sends fixed bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held = []

        def serve():
            peer, _ = listener.accept()
            peer.recv(65536)
            peer.sendall(answer)
            if close:
                peer.close()
            else:
                held.append(peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)
        for peer in held:
            peer.close()


def test_generate_gives_ids_text_and_figures():
    with StubServer() as stub:
        answer = client_of(stub.port).generate({"text": "hello", "sampling_params": GREEDY}, timeout=10)
        assert len(answer.ids) == 5 and answer.tokens == 5 and answer.finish == "length"
        assert answer.text is not None and answer.output == answer.ids
        by_ids = client_of(stub.port).generate({"input_ids": [1, 2], "sampling_params": GREEDY}, timeout=10)
        assert by_ids.text is None
        batch = client_of(stub.port).generate_batch({"input_ids": [[1], [2]], "sampling_params": GREEDY}, timeout=10)
        assert [len(answer.ids) for answer in batch] == [5, 5]
        assert client_of(stub.port).tokenize("ab") == (97, 98)


def test_api_key_goes_into_the_header_and_not_into_errors():
    with StubServer("refuses") as stub:
        client = client_of(stub.port, "s3cret")
        with pytest.raises(HttpStatus) as caught:
            client.generate({"text": "x", "sampling_params": {"temperature": 1.0, "max_new_tokens": 1}}, timeout=10)
        assert stub.requests[0][2]["Authorization"] == "Bearer s3cret"
        assert "s3cret" not in str(caught.value.as_dict())
        assert caught.value.status == 400 and "temperature > 0 is not supported" in caught.value.what


def test_server_info_falls_back_to_the_old_path():
    with StubServer() as stub:
        assert client_of(stub.port).server_info().speculative_algorithm == "STUB"
        asked = []

        def old_release(handler):
            asked.append(handler.path)
            known = handler.path == "/get_server_info"
            stub.answer(handler, 200 if known else 404, {"version": "old"} if known else {})

        stub.get = old_release
        assert client_of(stub.port).server_info() == ServerInfo()
        assert asked == ["/server_info", "/get_server_info"]


def test_nobody_listens():
    with pytest.raises(ServerRefused) as caught:
        client_of(free_port()).health()
    assert isinstance(caught.value, NotReady) and caught.value.next_step


def test_no_answer_in_time():
    with StubServer("hangs") as stub, pytest.raises(ServerTimeout):
        client_of(stub.port).generate({"text": "x", "sampling_params": GREEDY}, timeout=0.2)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nnot json!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["closes at once", "another protocol", "ends early", "no JSON", "no object", "no meta_info"],
)
def test_an_answer_that_makes_no_sense(answer):
    with raw_stub(answer) as port, pytest.raises(ServerBroke):
        client_of(port).generate({"text": "x", "sampling_params": GREEDY}, timeout=10)


def test_half_an_answer_and_silence():
    with (
        raw_stub(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", close=False) as port,
        pytest.raises(ServerTimeout),
    ):
        client_of(port).generate({"text": "x", "sampling_params": GREEDY}, timeout=0.2)


def test_every_failure_is_one_kind():
    for kind in (HttpStatus, ServerBroke, ServerRefused, ServerTimeout):
        assert issubclass(kind, ServerProblem)
