"""The smoke suite and readiness on a real SGLang 0.5.11 (on the CPU, where it has no sampling kernel).

Stock DFLASH answers 200 and decodes greedily at every temperature: it must fail, by the check that is about that.
Plain decoding samples, and must pass.
"""

import dataclasses

import pytest

from patcher.client import SglangClient
from patcher.config import ServiceSettings
from patcher.connection import LocalConnection
from patcher.readiness import wait_ready
from patcher.remote import call_agent
from patcher.service import ServiceHost, make_service
from patcher.smoke import record_baseline, run_suite
from patcher.suite import load_suite

pytestmark = pytest.mark.server
SUITE = dataclasses.replace(load_suite("tiny"), max_new_tokens=32, samples=8)


def reach(venv, port):
    """(client, service) of a server on this machine."""
    connection = LocalConnection()

    def ask(op, **fields):
        return call_agent(connection, str(venv / "bin/python"), {"op": op, "package": "sglang", **fields})

    host = ServiceHost("local", connection, ask, ask("inspect", paths=[])["state_dir"], port)
    # `command` looks at a server and keeps no state in the venv, which other tests use too.
    service = make_service(ServiceSettings(kind="command", restart=("false",)), host)
    return SglangClient(connection, "127.0.0.1", port), service


def test_stock_dflash_fails_for_being_greedy(target_venv, cpu_server):
    client, service = reach(target_venv, cpu_server(target_venv, algorithm="DFLASH").port)
    ready = wait_ready(service, client, SUITE.paths, SUITE.prompts[0], deadline_s=300, started_after=0.0)
    assert list(ready.warmed) == list(SUITE.paths)
    baseline = record_baseline(client, SUITE)
    result = run_suite(client, SUITE, baseline=baseline, service=service, started_after=0.0)
    failed = {check.name for check in result.failed}
    assert "diverse" in failed
    assert failed <= {"diverse", "no_greedy_fallback_logged"}, result.as_dict()
    skipped = {check.name for check in result.checks if check.skipped}
    assert skipped == {"patch_identity"}
    assert result.rows[0].acceptance > 1.5


def test_plain_decoding_passes(target_venv, cpu_server):
    client, service = reach(target_venv, cpu_server(target_venv, algorithm=None).port)
    result = run_suite(client, SUITE, service=service, started_after=0.0)
    assert result.passed, result.as_dict()
    acceptance = next(check for check in result.checks if check.name == "acceptance")
    assert acceptance.skipped and "does not speculate" in acceptance.detail
