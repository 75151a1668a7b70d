"""A stub installation whose server one of the restart adapters looks after, and what every adapter has to do with it.

The settings come from docs/services.md, so that what is written there is what was tried.
"""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.command_line import Said
from tests.support.stub_host import StubHost

DOCUMENT = Path(__file__).parents[3] / "docs/services.md"


def documented(section: str, language: str, number: int = 0) -> str:
    """A block of that language in that section of docs/services.md, by default the first."""
    text = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[number]


def put_in(text: str, values: Mapping[str, object]) -> str:
    """`text` with each name in it replaced; every one must be there."""
    for name, value in values.items():
        assert name in text, (name, text)
        text = text.replace(name, str(value))
    return text


class Served:
    """`stub`: the installation. `shell`: how an operator's command line is run on the host. `options` of the tool."""

    def __init__(
        self,
        stub: StubHost,
        tool: Callable[..., Said],
        section: str,
        values: Mapping[str, object],
        shell: Callable[[str], None],
        ssh_name: str = "demo",
    ) -> None:
        self.stub, self.tool, self.shell = stub, tool, shell
        settings = put_in(
            documented(section, "toml"),
            {"10.1.2.200": ssh_name, "/opt/sglang/venv": stub.venv, "port = 30000": f"port = {stub.port}", **values},
        )
        stub.config.write_text(
            settings
            + f"""
[hosts.gpu1.smoke]
suite = "{stub.suite}"
[hosts.gpu1.ready]
deadline = 60
[hosts.gpu1.kernels]
require = false
"""
        )
        self.kind = tomllib.loads(settings)["hosts"]["gpu1"]["service"]["kind"]
        self.options = ("--host", "gpu1", "--config", str(stub.config), "--json")
        self.before = stub.hashes()

    def run(self, command: str, *more: str, code: int = 0) -> Said:
        said = self.tool(command, *self.options, *more)
        assert said.code == code, said.stdout + said.stderr
        return said

    def refused_as_a_process(self, keeper: str) -> None:
        """With the kind `process` nothing is touched, and the kind that would be right is named."""
        config, pids = self.stub.config.read_text(), self.stub.server_pids()
        head = config.partition("[hosts.gpu1.service]")[0]
        self.stub.config.write_text(head + "[hosts.gpu1.endpoint]" + config.partition("[hosts.gpu1.endpoint]")[2])
        said = self.run("apply", code=4)
        assert keeper in said.error["what"] and f'kind = "{self.kind}"' in said.error["next"], said.error
        assert self.stub.hashes() == self.before and self.stub.server_pids() == pids

    def serves(self, stage: str | None) -> bool:
        return self.stub.served_identity() == (self.stub.series.identity(stage) if stage else None)

    # ---- what every adapter has to do -----------------------------------------------------------------------

    def there_and_back(self) -> None:
        """apply, verify, doctor, restart, revert: each new process is seen as new, and runs the right files."""
        done = self.run("apply").host
        assert self.serves("temperature")
        checks = {check["name"]: check for check in done["checks"]}
        for name in ("new_process", "patch_identity", "no_greedy_fallback_logged"):
            assert checks[name]["passed"] and not checks[name]["skipped"], checks[name]
        ready = done["ready"]
        assert ready["listener_verified"]

        self.run("verify")
        assert self.run("status").host["state"] == "temperature"
        service = self.run("doctor").host["service"]
        assert service["kind"] == self.kind and service["running"]
        assert service["pid"] == ready["pid"] and abs(service["start_time"] - ready["start_time"]) < 1

        again = self.run("restart").host["ready"]
        assert again["pid"] != ready["pid"] and again["start_time"] > ready["start_time"] and self.serves("temperature")

        self.run("revert")
        assert self.stub.hashes() == self.before and self.serves(None)

    def failed_readiness(self) -> Said:
        """The patched server does not come up: files and service as before, and the old server answers."""
        self.stub.misbehave(patched=["--stub-fail"])
        said = self.run("apply", code=6)
        self._is_rolled_back(said, "restart and wait until ready")
        return said

    def failed_smoke(self) -> Said:
        """The patched server comes up and samples greedily."""
        self.stub.misbehave(patched=["--stub-mode", "greedy"])
        said = self.run("apply", code=7)
        self._is_rolled_back(said, "smoke suite")
        return said

    def _is_rolled_back(self, said: Said, failed: str) -> None:
        states = {step["name"]: step["state"] for step in said.host["steps"]}
        assert states[failed] == "failed" and states["bring back the old server"] == "done", states
        assert "rolled back" in said.host["summary"] and not said.host["changed"]
        assert self.stub.hashes() == self.before and self.serves(None)
        assert self.run("status").host["receipt_state"] == "none"

    def failed_rollback(self) -> Said:
        """Neither the new nor the old server comes up: the commands that are printed finish, once it can."""
        self.stub.misbehave(always=["--stub-fail"])
        said = self.run("apply", code=8)
        assert self.stub.hashes() == self.before, "the files are back all the same"
        tool_command, *by_hand = said.error["commands"]
        assert by_hand, said.error

        self.stub.misbehave()  # whatever the reason was, it is gone
        for command in by_hand:
            self.shell(command)
        self.stub.wait_answer()
        assert self.serves(None)

        program, *words = shlex.split(tool_command)
        assert program == "ddtree-patch"
        assert self.tool(*words).code == 0
        assert self.serves(None)
        return said


def ssh(config: Path, alias: str = "demo") -> Callable[[str], None]:
    """Runs a command line on the host as the operator who logs in there."""

    def run(line: str) -> None:
        done = subprocess.run(
            ["ssh", "-F", str(config), alias, line],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=120,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)

    return run
