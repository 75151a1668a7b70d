"""The smoke suite and readiness on a real SGLang 0.5.11 that samples: plain decoding must pass.

The stock server that must fail, DFLASH on a CPU, is case 36.
"""

import pytest
from msgspec.structs import replace

from patcher.hosts import ServiceSettings
from patcher.server.client import SglangClient
from patcher.server.readiness import wait_ready
from patcher.server.services.registry import ServiceHost, make_service
from patcher.smoke.run import run_suite
from patcher.smoke.suite import load_suite
from patcher.ssh.connection import LocalConnection
from patcher.wire.call import call_agent

pytestmark = pytest.mark.server
SUITE = replace(load_suite("tiny"), max_new_tokens=32, samples=8)


def reach(venv, port):
    """(client, service) of a server on this machine."""
    connection = LocalConnection()

    def ask(op, **fields):
        return call_agent(connection, str(venv / "bin/python"), {"op": op, "package": "sglang", **fields})

    host = ServiceHost("local", connection, ask, ask("inspect", paths=[])["state_dir"], port)
    # `command` looks at a server and keeps no state in the venv, which other tests use too.
    service = make_service(ServiceSettings(kind="command", restart=("false",)), host)
    return SglangClient(connection, "127.0.0.1", port), service


def test_plain_decoding_passes(target_venv, cpu_server):
    client, service = reach(target_venv, cpu_server(target_venv, algorithm=None).port)
    ready = wait_ready(service, client, SUITE.paths, SUITE.prompts[0], deadline_s=300, started_after=0.0)
    assert list(ready.warmed) == list(SUITE.paths)
    result = run_suite(client, SUITE, service=service, started_after=0.0)
    assert result.passed, result.as_dict()
    acceptance = next(check for check in result.checks if check.name == "acceptance")
    assert acceptance.skipped and "does not speculate" in acceptance.detail
