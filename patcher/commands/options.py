"""Options that several commands have, and the values that they mean."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from patcher.commands.selection import Selection
from patcher.errors import UsageProblem
from patcher.report.file import ReportFile
from patcher.report.outcome import Outcome
from patcher.rollout.run import Rollout

Command = Callable[..., Outcome]


@dataclass
class Asked:
    """What the command line asks of the report, once it is read: for `main`, which prints it."""

    as_json: bool = False
    detail: bool = False
    reports: list[ReportFile] = field(default_factory=list)


class Given(click.ParamType[str]):
    """Text that must not be empty: an unset shell variable does not mean "the default"."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value.strip():
            self.fail("is empty", param, ctx)
        return value


class NewFile(click.Path):
    """A file that is written; its path must not be empty either."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(os.fsdecode(super().convert(Given().convert(os.fspath(value), param, ctx), param, ctx)))


UP_TO = click.option("--up-to", type=Given(), metavar="STAGE", help="Stop at this stage: greedy or sampling.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
NO_RESTART = click.option("--no-restart", is_flag=True, help="Change the files only.")

_SELECTION = (
    click.option("-v", "--verbose", is_flag=True, help="Also print files and steps."),
    click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout."),
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        help="The hosts file; default: configs/hosts.toml, then ~/.config/ddtree-patch/hosts.toml.",
    ),
    click.option(
        "--site-packages", type=Given(), metavar="DIR", help="A tree without an interpreter: change files only."
    ),
    click.option("--venv", type=Given(), metavar="PATH", help="The venv; default: that of the serving process."),
    click.option("--local", is_flag=True, help="Work on this machine, without SSH."),
    click.option(
        "--limit",
        type=Given(),
        multiple=True,
        metavar="PATTERN",
        help="Only chosen hosts whose name, group or server matches, such as `gpu*`. Repeatable.",
    ),
    click.option(
        "--host",
        "hosts",
        type=Given(),
        multiple=True,
        metavar="NAME|ADDRESS",
        help="A host, group or multi-node server of hosts.toml, or an address. Repeatable.",
    ),
)
_ROLLOUT = (
    click.option(
        "--keep-going", is_flag=True, help="Continue with healthy hosts when others fail or cannot be planned."
    ),
    click.option(
        "--report",
        type=NewFile(),
        metavar="FILE",
        help="Also write the JSON document there, updated after every batch.",
    ),
    click.option("--all-at-once", is_flag=True, help="Change all hosts at once, without a first one alone."),
    click.option(
        "--batch",
        type=click.IntRange(min=1),
        metavar="N",
        help="After the first host, N at a time (a multi-node server counts as one); default: all.",
    ),
)


def selects(command: Command) -> Command:
    """Give the command the hosts that are meant, as its first argument."""

    @functools.wraps(command)
    def parsed(
        *,
        hosts: tuple[str, ...],
        limit: tuple[str, ...],
        local: bool,
        venv: str | None,
        site_packages: str | None,
        config: Path | None,
        as_json: bool,
        verbose: bool,
        **own: Any,
    ) -> Outcome:
        asked = click.get_current_context().find_object(Asked)
        if asked:
            asked.as_json, asked.detail = as_json, verbose
        return command(Selection(hosts, limit, local, venv, site_packages, config), **own)

    return _with(_SELECTION, parsed)


def rolls_out(command: Command) -> Command:
    """Give the command, which changes hosts, the order to change them in, and the report file."""

    @functools.wraps(command)
    def parsed(*args: Any, batch: int | None, all_at_once: bool, keep_going: bool, **own: Any) -> Outcome:
        if batch and all_at_once:
            raise UsageProblem("--batch and --all-at-once exclude each other", next_step="give one of them")
        return command(*args, rollout=Rollout(not all_at_once, batch or 0, keep_going), **own)

    return _with(_ROLLOUT, parsed)


def _with(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in options:
        command = option(command)
    return command
