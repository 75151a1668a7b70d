"""An Outcome as JUnit XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from patcher.report.findings import Case
from patcher.report.outcome import FAILED, SKIPPED, HostResult, Outcome


def to_junit(outcome: Outcome) -> bytes:
    """One test suite a host, one test case a check (a step, where the command has no checks)."""
    root = ET.Element("testsuites", name=f"ddtree-patch {outcome.command}")
    for host in outcome.hosts:
        cases = _cases(host)
        failed = sum(not case.passed for case in cases)
        broke = host.error is not None and not failed
        label = _xml_safe(f"{outcome.command}.{host.host}")
        suite = ET.SubElement(
            root,
            "testsuite",
            name=_xml_safe(host.host),
            tests=str(len(cases) + broke),
            failures=str(failed),
            errors=str(int(broke)),
            skipped=str(sum(case.skipped for case in cases)),
        )
        for case in cases:
            element = ET.SubElement(
                suite, "testcase", classname=label, name=_xml_safe(case.name), time=f"{case.seconds:.3f}"
            )
            if case.skipped:
                ET.SubElement(element, "skipped", message=_xml_safe(case.detail))
            elif not case.passed:
                ET.SubElement(element, "failure", message=_xml_safe(case.detail))
        if broke and host.error:
            element = ET.SubElement(suite, "testcase", classname=label, name=outcome.command)
            ET.SubElement(element, "error", message=_xml_safe(str(host.error)), type=host.error.kind)
    written: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return written


def _cases(host: HostResult) -> list[Case]:
    checks = [case for finding in host.findings for case in finding.cases()]
    return checks or [
        Case(step.name, step.state != FAILED, step.detail, step.state == SKIPPED, step.seconds) for step in host.steps
    ]


def _xml_safe(value: str) -> str:
    """XML 1.0 has no way to write control characters, not even escaped."""
    return "".join(c if c in "\n\t" or c.isprintable() else "?" for c in value)
