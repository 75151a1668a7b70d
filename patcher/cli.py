"""The command line: options in, one outcome out. No logic here.

stdout carries results only, and exactly one JSON document with --json, whatever happens; everything else is stderr.
Every failure ends in `main`, which is the only place that knows exit codes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from patcher import __version__
from patcher.commands import run
from patcher.commands.fork import fork
from patcher.errors import DdtreePatchError, Interrupted, UsageProblem
from patcher.report.file import ReportFile
from patcher.report.outcome import Outcome
from patcher.report.render import console_for, error_to_json, print_error, print_outcome, to_json, to_junit
from patcher.report.stderr import message_console
from patcher.rollout import unexpected


class Given(click.ParamType):
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

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return super().convert(Given().convert(value, param, ctx), param, ctx)


def common(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """The options that every command has."""
    for option in (
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
    ):
        command = option(command)
    return command


def in_waves(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """The options of commands that change hosts."""
    for option in (
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
    ):
        command = option(command)
    return command


class InOrder(click.Group):
    """Lists its commands in the order of work, which is the order of their definitions."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="ddtree-patch")
def cli() -> None:
    """Bring a stock SGLang on a GPU host to exact DDTree speculative sampling, and back."""


@cli.command(short_help="Check whether a host is ready for apply")
@common
def doctor(**options: Any) -> Outcome:
    """Check everything that apply depends on, and try the kernel as apply would. Changes nothing."""
    return run.doctor(**options)


@cli.command(short_help="Print the changes of apply as a diff")
@common
@click.option("--up-to", type=Given(), metavar="STAGE", help="Stop at this stage: greedy or sampling.")
def diff(**options: Any) -> Outcome:
    """Print what apply would change, as a unified diff against what is installed."""
    return run.diff(**options)


@cli.command(short_help="Patch, restart, check; keep it or roll back")
@common
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--up-to", type=Given(), metavar="STAGE", help="Stop at this stage: greedy or sampling.")
@click.option("--no-restart", is_flag=True, help="Change the files only.")
@click.option("--no-smoke", is_flag=True, help="Do not run the smoke suite after the restart.")
@in_waves
def apply(report: Path | None, **options: Any) -> Outcome:
    """Patch, restart, wait until ready and check. If anything fails, put everything back."""
    return _reported(run.apply, report, _json_bytes, options)


@cli.command(short_help="Check files, kernel and running server")
@common
def verify(**options: Any) -> Outcome:
    """Check that the patched files are intact, the kernel is right, and the server runs the patch."""
    return run.verify(**options)


@cli.command("smoke-test", short_help="Run the smoke suite on the running server")
@common
@click.option("--suite", type=Given(), metavar="FILE|NAME", help="The suite to run.")
@click.option("--junit", type=NewFile(), help="Write a JUnit report there.")
def smoke_test(junit: Path | None, **options: Any) -> Outcome:
    """Run the smoke suite against the running server."""
    return _reported(run.smoke_test, junit, to_junit, options)


@cli.command(short_help="Show what is patched, file by file")
@common
def status(**options: Any) -> Outcome:
    """Show what is patched, by whom and when, and the state of each file."""
    return run.status(**options)


@cli.command(short_help="Restore the files and restart the server")
@common
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--no-restart", is_flag=True, help="Change the files only.")
@in_waves
def revert(report: Path | None, **options: Any) -> Outcome:
    """Restore every file as it was before the first apply, and restart the server as it was."""
    return _reported(run.revert, report, _json_bytes, options)


@cli.command(short_help="Restart the server, wait until it is ready")
@common
@in_waves
def restart(report: Path | None, **options: Any) -> Outcome:
    """Restart the server and wait until it is ready."""
    return _reported(run.restart, report, _json_bytes, options)


@cli.command(short_help="List what was done, oldest first")
@common
def history(**options: Any) -> Outcome:
    """List what was done to the installation, oldest first."""
    return run.history(**options)


@cli.command("list", short_help="List the patch series, or what hosts run")
@common
def list_(**options: Any) -> Outcome:
    """List the patch series; with hosts, list what is installed and running there."""
    return run.list_series(**options)


cli.add_command(fork)


def _reported(
    command: Callable[..., Outcome], path: Path | None, form: Callable[[Outcome], bytes], options: dict[str, Any]
) -> Outcome:
    """Run a command whose outcome is kept in a file as well, if `path` names one, from its first result on."""
    if path is None:
        return command(**options)
    report = ReportFile(path, form)
    click.get_current_context().obj.append(report)
    outcome = command(so_far=report.keep, **options)
    report.write(outcome)
    return outcome


def _json_bytes(outcome: Outcome) -> bytes:
    return to_json(outcome).encode() + b"\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    _open_closed_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        reports: list[ReportFile] = []
        outcome = cli.main(args=args, prog_name="ddtree-patch", standalone_mode=False, obj=reports)
        if not isinstance(outcome, Outcome):
            return int(outcome or 0)  # --help, --version
        return _finish(outcome, "--json" in args, [report.failure for report in reports if report.failure])
    except click.UsageError as error:
        usage = error.ctx.command_path if error.ctx else "ddtree-patch"
        failure: DdtreePatchError = UsageProblem(error.format_message(), where=usage, next_step=f"see {usage} --help")
    except click.ClickException as error:
        failure = UsageProblem(error.format_message())
    except DdtreePatchError as error:
        failure = error
    except (KeyboardInterrupt, click.Abort):
        return stopped(args)
    except Exception as error:
        failure = unexpected(error, "ddtree-patch")
    return _failed(failure, args)


def stopped(args: Sequence[str]) -> int:
    """Report an interrupt before the first host was touched; return the exit code."""
    return _failed(Interrupted("stopped", next_step="ddtree-patch status says where a host stands"), args)


def _failed(failure: DdtreePatchError, args: Sequence[str]) -> int:
    if "--json" in args:
        text = error_to_json(failure, next((word for word in args if word in cli.commands), ""))
        _write_result(lambda: click.echo(text))
    print_error(failure, message_console())
    return failure.exit_code


def _finish(outcome: Outcome, as_json: bool, unwritten: Sequence[DdtreePatchError]) -> int:
    """Print the result on stdout and the failures on stderr, those of report files (`unwritten`) too."""
    if as_json:
        written = _write_result(lambda: click.echo(to_json(outcome)))
    else:
        written = _write_result(lambda: print_outcome(outcome, console_for(sys.stdout)))
    overall = outcome.error
    several = len(outcome.hosts) > 1
    for host in outcome.hosts:
        if host.error:
            print_error(host.error, message_console(), host.host if several else "")
    of_none = [overall] if overall and all(overall is not host.error for host in outcome.hosts) else []
    for error in (*of_none, *unwritten):
        print_error(error, message_console())
    if overall:
        return overall.exit_code
    if unwritten:
        return unwritten[0].exit_code
    return 0 if written else DdtreePatchError.exit_code


def _open_closed_streams() -> None:
    """Send a stream that the caller closed (`>&-`) to nowhere, so that writing to it does not fail."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the whole run


def _write_result(write: Callable[[], None]) -> bool:
    """Write all of it to stdout. A reader that closed the pipe early (`| head`) is not a failure; a full disk is."""
    try:
        write()
        sys.stdout.flush()
        return True
    except SystemExit:  # rich's answer to a closed pipe
        return True
    except OSError as error:
        # What is left in the buffer must not fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return True
        print_error(
            DdtreePatchError(
                f"the result could not be written: {error.strerror}",
                where="stdout",
                next_step="what was done stands; ddtree-patch status says where",
            ),
            message_console(),
        )
        return False


if __name__ == "__main__":
    sys.exit(main())
