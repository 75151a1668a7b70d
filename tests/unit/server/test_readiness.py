"""Readiness: what a restarted server must have done before it is called ready, and how its failures are told."""

import socket
import threading

import pytest

from patcher.errors import HostUnreachable, NotReady
from patcher.server.client import SglangClient
from patcher.server.readiness import OLD_LISTENER_S, wait_ready
from patcher.smoke.suite import SAMPLING_PATHS, Prompt
from patcher.ssh.connection import LocalConnection
from tests.support.fake_service import FakeClock, FakeService, process
from tests.support.stub_sglang import StubServer

STARTED_AFTER = 400.0
OLD = {"pid": 5, "start_time": 100.0, "argv": ["python", "-m", "sglang.launch_server"]}


def client_of(port):
    return SglangClient(LocalConnection(), "127.0.0.1", port)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait(service, client, clock=None, deadline_s=1800.0, paths=tuple(SAMPLING_PATHS), progress=None):
    clock = clock or FakeClock()
    return wait_ready(
        service,
        client,
        paths,
        Prompt("p", text="x"),
        deadline_s=deadline_s,
        started_after=STARTED_AFTER,
        progress=progress or (lambda text: None),
        now=clock.now,
        sleep=clock.sleep,
    )


def test_every_sampling_path_is_asked_once_with_temperature_1():
    with StubServer() as stub:
        report = wait(FakeService(process()), client_of(stub.port))
    asked = [request["sampling_params"] for _, request, _ in stub.requests]
    assert [set(params) - {"temperature", "max_new_tokens"} for params in asked] == [
        set(),
        {"top_k"},
        {"top_p"},
        {"top_k", "top_p"},
        {"min_p"},
    ]
    assert all(params["temperature"] == 1.0 for params in asked)
    assert list(report.warmed) == list(SAMPLING_PATHS)
    assert report.pid == 10 and report.listener_verified
    assert report.as_dict()["warmed"].keys() == SAMPLING_PATHS.keys()


def test_waits_for_process_port_and_health_in_turn():
    told = []
    old, starting = process(pid=5, start_time=100.0), process(owner="none")
    with StubServer(unavailable=3) as stub:
        wait(FakeService(old, None, starting, starting, process()), client_of(stub.port), progress=told.append)
    waits = [text.rpartition(",")[0] for text in told]
    assert waits[:4] == [
        "waiting for the new server process",
        "waiting for the new server process",
        "waiting for the server to listen",
        "waiting for the server to listen",
    ]
    assert waits[4:7] == ["waiting for /health (HTTP 503)"] * 3


def test_refused_then_503_then_200():
    port = free_port()
    clock, stub = FakeClock(), None

    def sleep(seconds):
        nonlocal stub
        clock.time += seconds
        if clock.time >= 1005 and stub is None:
            stub = StubServer(port=port, unavailable=2)
            stub.__enter__()

    told = []
    try:
        wait_ready(
            FakeService(process()),
            client_of(port),
            ["top_k"],
            Prompt("p", text="x"),
            deadline_s=100,
            started_after=STARTED_AFTER,
            progress=told.append,
            now=clock.now,
            sleep=sleep,
        )
    finally:
        stub.__exit__()
    told = "\n".join(told)
    assert told.index("nobody listens") < told.index("HTTP 503") < told.index("first top_k request")


def test_health_alone_is_not_enough_and_the_deadline_says_what_was_waited_for():
    told = []
    with StubServer("hangs") as stub, pytest.raises(NotReady) as caught:
        wait_ready(
            FakeService(process()),
            client_of(stub.port),
            ["top_k_top_p"],
            Prompt("p", text="x"),
            deadline_s=0.5,
            started_after=STARTED_AFTER,
            progress=told.append,
        )
    assert "waiting for first top_k+top_p request" in caught.value.what
    assert "deadline of 0.5 s" in caught.value.what
    assert any(
        text.startswith("waiting for first top_k+top_p request: kernels may compile for minutes, 0 s so far")
        for text in told
    )
    assert caught.value.detail == "line 1\nline 2"


@pytest.mark.parametrize(("listens_after", "ready"), [(1799.0, True), (1801.0, False)])
def test_one_second_before_and_after_the_deadline(listens_after, ready):
    clock = FakeClock()
    begun = clock.time

    class Starting(FakeService):
        def live(self):
            return process(owner="server" if clock.time - begun >= listens_after else "none")

    with StubServer() as stub:
        if ready:
            assert wait(Starting(None), client_of(stub.port), clock).seconds >= listens_after
        else:
            with pytest.raises(NotReady, match="1800"):
                wait(Starting(None), client_of(stub.port), clock)


def test_a_process_that_dies_fails_at_once_with_its_last_lines():
    clock = FakeClock()
    service = FakeService(process(owner="none"), None, why="exit status 1", log="\n".join(map(str, range(100))))
    with pytest.raises(NotReady) as caught:
        wait(service, client_of(1), clock)
    assert clock.time - 1000 < 5
    assert "process 10 died: exit status 1" in caught.value.what
    assert caught.value.detail.split("\n")[-1] == "99" and len(caught.value.detail.split("\n")) < 40


def test_a_process_that_was_replaced_by_its_supervisor_died():
    with pytest.raises(NotReady, match="process 10 died"):
        wait(FakeService(process(owner="none"), process(pid=11, owner="none")), client_of(1))


def test_a_service_that_cannot_start_fails_before_any_process_is_seen():
    with pytest.raises(NotReady, match="does not start: x is failed"):
        wait(FakeService(None, why="x is failed"), client_of(1))


def test_death_while_a_request_hangs_is_noticed_meanwhile():
    with StubServer("hangs") as stub:
        service = FakeService(process(), None)
        service.states = [process(), None]
        with pytest.raises(NotReady, match="process 10 died"):
            wait(service, client_of(stub.port))


def test_the_old_process_keeps_the_port():
    clock = FakeClock()
    with pytest.raises(NotReady) as caught:
        wait(FakeService(process(owner="other", other=OLD)), client_of(1), clock)
    assert "held by process 5 from before the restart" in caught.value.what
    assert "process 5" in caught.value.next_step
    assert OLD_LISTENER_S <= clock.time - 1000 < OLD_LISTENER_S + 10


def test_the_old_process_alone_is_never_ready():
    with StubServer() as stub, pytest.raises(NotReady, match="waiting for the new server process"):
        wait(FakeService(process(start_time=100.0)), client_of(stub.port), deadline_s=30.0)
    assert stub.requests == []


def test_a_port_whose_owner_may_not_be_seen_is_used_and_said():
    with StubServer() as stub:
        assert not wait(FakeService(process(owner="unseen")), client_of(stub.port)).listener_verified


def test_a_refused_sampling_path_fails_at_once():
    clock = FakeClock()
    with StubServer("refuses") as stub, pytest.raises(NotReady) as caught:
        wait(FakeService(process()), client_of(stub.port), clock)
    assert "the first temperature request failed" in caught.value.what
    assert "temperature > 0 is not supported" in caught.value.what


def test_503_while_warming_is_waited_out():
    with StubServer() as stub:
        real, busy = stub.post, [1, 1]

        def post(handler, body):
            if busy:
                busy.pop()
                return stub.answer(handler, 503, {})
            return real(handler, body)

        stub.post = post
        wait(FakeService(process()), client_of(stub.port))
    assert not busy


def test_a_lost_connection_to_the_host_is_no_matter_of_readiness():
    class Lost(LocalConnection):
        def open_socket(self, host, port, timeout=30):
            if threading.current_thread() is threading.main_thread():
                return super().open_socket(host, port, timeout)
            raise HostUnreachable("the connection was lost")

    with StubServer() as stub, pytest.raises(HostUnreachable):
        wait(FakeService(process()), SglangClient(Lost(), "127.0.0.1", stub.port))
