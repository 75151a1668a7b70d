"""The kernel gate of apply and verify: is the sampling op there, and right?"""

from __future__ import annotations

from patcher.commands.findings import Kernel
from patcher.installation.session import Session
from patcher.report.outcome import WARNING
from patcher.server.kernel import kernel_report


def check_kernel(session: Session, *, stage: str, sampled: bool) -> None:
    """Probe the op with the venv's own interpreter, as a step; raises KernelProblem.

    `stage`: the one whose behaviour without the op is told. A missing op is a warning where kernels.require is false,
    and where nothing samples (`sampled` False).
    """
    with session.result.step("kernel probe") as step:
        report = kernel_report(session.target.ask, version=session.version, where=session.host.name)
        session.result.keep(Kernel(report))
        warnings = report.check(require=session.host.kernels.require and sampled, stage=stage)
        step.detail = "; ".join(warnings) or f"right on {(report.trees or {}).get('trees')} random trees"
        if warnings:
            step.state = WARNING
            session.result.not_done += [f"kernel: {warning}" for warning in warnings]
