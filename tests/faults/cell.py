"""One cell: strike, look, let the next command speak, look again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from scripts.rig.sshd import Sshd
from tests.faults import look
from tests.faults.agent import PATIENCE_S, Striker, cut_channel
from tests.faults.causes import CAUSES, ORDER, Fault
from tests.faults.cells import END, JOBS, Cell
from tests.faults.prepare import Said, Starts, ask, installation_in, only_files
from tests.support.installations import STAGES

LOOK = {"op": "inspect"}  # the next command: any one recovers first
LASTING = ("ENOSPC", "EROFS", "EBUSY", "EACCES")  # still there for the next command, until someone lifts them


@dataclass
class Result:
    """exit: of the command that was struck (None: it was killed). at_once, journal: right after it.
    meanwhile: exit of the next command while the fault lasts. said, next_exit, final: the next command, once it is
    lifted, and what it leaves. what: the words of the failure. problems: what must not be.
    """

    cell: Cell
    exit: int | None = None
    at_once: str = ""
    journal: str = ""
    meanwhile: int | None = None
    said: str = ""
    next_exit: int | None = None
    final: str = ""
    what: str = ""
    problems: list[str] = field(default_factory=list)


def run_cell(cell: Cell, starts: Starts, folder: Path) -> Result:
    """Run it in FOLDER, which is made and removed. Raises nothing: what breaks is a problem of the result."""
    folder.mkdir()
    fault = CAUSES[cell.fault](folder)
    result = Result(cell)
    try:
        fault.place(starts.folder / JOBS[cell.job].start)
        try:
            _Run(cell, starts, fault, result).run()
        finally:
            fault.close()
    except Exception as error:
        result.problems.append(f"the cell broke: {error!r}")
    shutil.rmtree(folder)
    return result


class _Run:
    def __init__(self, cell: Cell, starts: Starts, fault: Fault, result: Result):
        self.cell, self.fault, self.result = cell, fault, result
        self.job = JOBS[cell.job]
        self.old, self.new = starts.old(self.job), starts.ends[cell.job]
        self.request, self.series = starts.requests[cell.job], starts.folder / "series"
        self.installation = installation_in(fault.host)
        before, after = (STAGES[stage] for stage in self.job.stages)
        self.changed = [path for path in ORDER if before[path] != after[path]]
        self.theirs = cell.fault == "changed file"
        self.commands: tuple[str, ...] = ()
        self.left: list[str] = []  # what the reply says could not be removed

    def run(self) -> None:
        self._job()
        result, fault = self.result, self.fault
        if self.cell.fault == "power loss":
            fault.lift()
        result.at_once, result.journal = self._state(), look.journal(self.installation)
        if self.cell.fault in LASTING:
            result.meanwhile = ask(self.installation, LOOK).exit
            if self._state() != result.at_once and result.at_once != "mixed":
                result.problems.append(f"the next command made it {self._state()} while the fault lasted")
            fault.lift()
        if self.theirs and self.commands:
            for command in self.commands:
                subprocess.run(command, shell=True, check=True)
            self.theirs = False
        said = ask(self.installation, LOOK)
        result.next_exit, result.final, result.said = said.exit, self._state(), said.reply.get("recovered", "?")
        result.problems += look.litter(self.installation, self.old, self.new)
        result.problems += self._judge()

    def _state(self) -> str:
        return look.state(self.installation, only_files(self.old), only_files(self.new), theirs=self.theirs)

    # ---- the command that is struck ---------------------------------------------------------------------------

    def _job(self) -> None:
        if self.cell.point.startswith(END):
            self._note(ask(self.installation, self.request))
            self.fault.strike(self.installation, self.changed, self.cell.point)
            return
        lock = self.installation.state / "lock"
        if not self.job.commits:
            lock.unlink()  # the dead holder's: what is waited for is the next one's
        if self.cell.fault == "client killed":
            self._killed_client(lock)
        elif self.cell.fault == "channel cut":
            self._cut_channel(lock)
        else:
            striker = Striker(lock, self._strike, fatal=self.fault.fatal)
            self._note(ask(self.installation, self.request, DDTREE_AGENT_STOP_AT=self.cell.point))
            self._over(striker)

    def _strike(self, pid: int) -> None:
        self.fault.strike(self.installation, self.changed, self.cell.point)

    def _cut_channel(self, lock: Path) -> None:
        sshd = Sshd(self.fault.folder / "sshd", extra=f"SetEnv DDTREE_AGENT_STOP_AT={self.cell.point}")
        try:
            client = self._client("--host", sshd.alias, DDTREE_PATCH_SSH_CONFIG=str(sshd.ssh_config))
            listener = int((sshd.home / "sshd.pid").read_text())
            striker = Striker(lock, lambda pid: cut_channel(pid, listener), fatal=False)
            self.result.exit = client.wait(PATIENCE_S)
            self._over(striker)
        finally:
            sshd.stop()

    def _killed_client(self, lock: Path) -> None:
        client = self._client(DDTREE_AGENT_STOP_AT=self.cell.point)

        def kill(pid: int) -> None:
            client.send_signal(signal.SIGKILL)
            client.wait()

        striker = Striker(lock, kill, fatal=False)
        client.wait(PATIENCE_S)
        self._over(striker)

    def _client(self, *options: str, **environment: str) -> subprocess.Popen:
        """The command line, in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "patcher", *self.job.argv, "--venv", str(self.fault.host), *options],
            env={**os.environ, "DDTREE_PATCH_SERIES_ROOT": str(self.series), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _over(self, striker: Striker) -> None:
        striker.end()
        if striker.pid is None:
            self.result.problems.append(f"the agent never came to {self.cell.point}")

    def _note(self, said: Said) -> None:
        self.result.exit, self.result.what, self.commands = said.exit, said.what, said.commands
        self.left = said.reply.get("left", [])

    # ---- what must be -----------------------------------------------------------------------------------------

    def _judge(self) -> list[str]:
        """What is not as the design says."""
        result, problems = self.result, []
        if result.final not in ("old", "new"):
            problems.append(f"files are {result.final} after the next command")
        if result.next_exit != 0:
            problems.append(f"the next command exits {result.next_exit}")
        promised = {"writing": ("undone", "old"), "committed": ("finished", "new")}.get(
            result.journal, ("nothing", result.at_once)
        )
        if (result.said, result.final) != promised:
            problems.append(f"the journal said {result.journal}, the next command {result.said}: {result.final}")
        if self.cell.fault == "changed file" and self.theirs and not look.has_their_line(self.installation):
            problems.append("the line that someone wrote is lost")
        return problems + self._judge_exit()

    def _judge_exit(self) -> list[str]:
        result, wanted = self.result, "old" if self.cell.job == "recover, undoing" else "new"
        lone = self.cell.fault in ("channel cut", "client killed")
        if lone and (result.at_once, result.journal) != (wanted, "none"):
            return [f"nobody listened, and the agent left {result.at_once}, journal {result.journal}"]
        if self.cell.fault == "client killed":
            return []
        if self.cell.point.startswith(END):
            return [] if (result.exit, result.at_once) == (0, wanted) else [f"exit {result.exit}: {result.at_once}"]
        if lone or self.fault.fatal:
            return [] if result.exit == 3 else [f"exit {result.exit}, not 3"]
        allowed = {
            0: (result.journal == "none" or self.left) and result.at_once == wanted,
            4: result.journal in ("none", "writing") and result.at_once == "old",
            8: result.journal != "none",
        }
        if allowed.get(result.exit):
            return []
        return [f"exit {result.exit} with {result.at_once} files and journal {result.journal}: {result.what}"]
