"""The command line: options in, one outcome out. No logic here.

stdout carries results only, and exactly one JSON document with --json, whatever happens; everything else is stderr.
Every failure ends in `main`, which is the only place that knows exit codes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click

from patcher import __version__
from patcher.commands.apply import Apply
from patcher.commands.apply_plan import ApplyOptions
from patcher.commands.doctor import Doctor
from patcher.commands.fork import fork
from patcher.commands.listing import Catalogue
from patcher.commands.options import DRY_RUN, NO_RESTART, UP_TO, Asked, Given, NewFile, rolls_out, selects
from patcher.commands.revert import Revert, RevertOptions
from patcher.commands.selection import Selection, SoFar, nobody
from patcher.commands.serve import Restart, SmokeTest
from patcher.commands.status import Diff, History, List, Status
from patcher.commands.verify import Verify
from patcher.errors import DdtreePatchError, Interrupted, UsageProblem, unexpected
from patcher.report.file import ReportFile
from patcher.report.junit import to_junit
from patcher.report.outcome import Outcome
from patcher.report.render import console_for, error_to_json, print_error, print_outcome, to_json
from patcher.report.stderr import message_console
from patcher.report.stdout import open_closed_streams, write_result
from patcher.rollout.run import Rollout
from patcher.series.catalogue import catalogue
from patcher.smoke.suite import load_suite


class InOrder(click.Group):
    """Lists its commands in the order of work, which is the order of their definitions."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="ddtree-patch")
def cli() -> None:
    """Bring a stock SGLang on a GPU host to exact DDTree speculative sampling, and back."""


@cli.command(short_help="Check whether a host is ready for apply")
@selects
def doctor(selection: Selection) -> Outcome:
    """Check everything that apply depends on, and try the kernel as apply would. Changes nothing."""
    return selection.look("doctor", Doctor)


@cli.command(short_help="Print the changes of apply as a diff")
@selects
@UP_TO
def diff(selection: Selection, up_to: str | None) -> Outcome:
    """Print what apply would change, as a unified diff against what is installed."""
    return selection.look("diff", lambda session: Diff(session, up_to or ""))


@cli.command(short_help="Patch, restart, check; keep it or roll back")
@selects
@DRY_RUN
@UP_TO
@NO_RESTART
@click.option("--no-smoke", is_flag=True, help="Do not run the smoke suite after the restart.")
@rolls_out
def apply(
    selection: Selection,
    rollout: Rollout,
    report: Path | None,
    dry_run: bool,
    up_to: str | None,
    no_restart: bool,
    no_smoke: bool,
) -> Outcome:
    """Patch, restart, wait until ready and check. If anything fails, put everything back."""
    options = ApplyOptions(dry_run=dry_run, up_to=up_to or "", restart=not no_restart, smoke=not no_smoke)
    return _reported(
        report,
        _json_bytes,
        lambda so_far: selection.change("apply", lambda unit: Apply(unit, options), rollout, so_far),
    )


@cli.command(short_help="Check files, kernel and running server")
@selects
def verify(selection: Selection) -> Outcome:
    """Check that the patched files are intact, the kernel is right, and the server runs the patch."""
    return selection.look("verify", Verify)


@cli.command("smoke-test", short_help="Run the smoke suite on the running server")
@selects
@click.option("--suite", type=Given(), metavar="FILE|NAME", help="The suite to run.")
@click.option("--junit", type=NewFile(), help="Write a JUnit report there.")
def smoke_test(selection: Selection, suite: str | None, junit: Path | None) -> Outcome:
    """Run the smoke suite against the running server."""
    named = load_suite(suite) if suite else None
    return _reported(
        junit, to_junit, lambda so_far: selection.look("smoke-test", lambda session: SmokeTest(session, named), so_far)
    )


@cli.command(short_help="Show what is patched, file by file")
@selects
def status(selection: Selection) -> Outcome:
    """Show what is patched, by whom and when, and the state of each file."""
    return selection.look("status", Status)


@cli.command(short_help="Restore the files and restart the server")
@selects
@DRY_RUN
@NO_RESTART
@rolls_out
def revert(selection: Selection, rollout: Rollout, report: Path | None, dry_run: bool, no_restart: bool) -> Outcome:
    """Restore every file as it was before the first apply, and restart the server as it was."""
    options = RevertOptions(dry_run=dry_run, restart=not no_restart)
    return _reported(
        report,
        _json_bytes,
        lambda so_far: selection.change(
            "revert",
            lambda unit: Revert(unit, options),
            rollout,
            so_far,
            # The files of one node alone: what a failed rollback may leave to do.
            whole=not no_restart,
        ),
    )


@cli.command(short_help="Restart the server, wait until it is ready")
@selects
@rolls_out
def restart(selection: Selection, rollout: Rollout, report: Path | None) -> Outcome:
    """Restart the server and wait until it is ready."""
    return _reported(report, _json_bytes, lambda so_far: selection.change("restart", Restart, rollout, so_far))


@cli.command(short_help="List what was done, oldest first")
@selects
def history(selection: Selection) -> Outcome:
    """List what was done to the installation, oldest first."""
    return selection.look("history", History)


@cli.command("list", short_help="List the patch series, or what hosts run")
@selects
def list_(selection: Selection) -> Outcome:
    """List the patch series; with hosts, list what is installed and running there."""
    series = (Catalogue(catalogue()),)
    if selection.is_empty:
        return Outcome("list", findings=series)
    return replace(selection.look("list", List), findings=series)


cli.add_command(fork)


def _reported(path: Path | None, form: Callable[[Outcome], bytes], command: Callable[[SoFar], Outcome]) -> Outcome:
    """Run a command whose outcome is kept in a file as well, if `path` names one, from its first result on."""
    if path is None:
        return command(nobody)
    report = ReportFile(path, form)
    click.get_current_context().obj.reports.append(report)
    outcome = command(report.keep)
    report.write(outcome)
    return outcome


def _json_bytes(outcome: Outcome) -> bytes:
    return to_json(outcome).encode() + b"\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    open_closed_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        asked = Asked()
        outcome = cli.main(args=args, prog_name="ddtree-patch", standalone_mode=False, obj=asked)
        if not isinstance(outcome, Outcome):
            return int(outcome or 0)  # --help, --version
        return _finish(outcome, asked)
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
        write_result(lambda: click.echo(text))
    print_error(failure, message_console())
    return failure.exit_code


def _finish(outcome: Outcome, asked: Asked) -> int:
    """Print the result on stdout and the failures on stderr, those of report files too."""
    unwritten = [report.failure for report in asked.reports if report.failure]
    if asked.as_json:
        written = write_result(lambda: click.echo(to_json(outcome)))
    else:
        written = write_result(lambda: print_outcome(outcome, console_for(sys.stdout), asked.detail))
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


if __name__ == "__main__":
    sys.exit(main())
