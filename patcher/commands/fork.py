"""fork: a series as commits of a git work tree, carried to other releases and written from there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from patcher.errors import UnsupportedVersion, UsageProblem
from patcher.series import port as porting
from patcher.series.catalogue import catalogue, load_series
from patcher.series.export import export as export_series
from patcher.series.git import git
from patcher.series.model import Series
from patcher.series.releases import copy_tree, find_wheel, unpack
from patcher.series.settings import SETTINGS
from patcher.series.versions import choose, nearest
from patcher.series.worktree import BASE, Base, base_of, make, replay

PACKAGE = "sglang"
FOLDER = click.Path(file_okay=False, resolve_path=True, path_type=Path)
EXISTING = click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)
work_option = click.option("--work", required=True, type=FOLDER, help="The git work tree.")
wheels_option = click.option(
    "--wheels", type=EXISTING, help="Take wheels from this directory; default: from the cache, which pip fills."
)


@click.group(short_help="Edit or port a series as git commits")
def fork() -> None:
    """Edit a series as git commits: make a work tree, port a series to another release, export the result."""


@fork.command(short_help="Make a work tree of a release and its series")
@click.argument("version")
@work_option
@click.option("--from-tree", "tree", type=EXISTING, help="A copy of your own site-packages; its files are the base.")
@wheels_option
def init(version: str, work: Path, tree: Path | None, wheels: Path | None) -> None:
    """Make a work tree of release VERSION, and of its series, one commit a patch.

    With --from-tree the base is a tree of your own, and no patch is applied to it: fork port merges them.
    """
    base = Base(PACKAGE, version)
    if tree:
        make(work, base, partial(copy_tree, tree, PACKAGE, version))
        known = [series for series in catalogue() if series.package == PACKAGE]
        near = nearest(known, version).name if known else "SERIES"
        click.echo(f"Initialized {work}: {PACKAGE} {version} as it is in {tree}")
        click.echo(f"next: ddtree-patch fork port --from {near} --work {work}")
        return
    wheel = find_wheel(PACKAGE, version, wheels)
    try:
        series = choose(catalogue(), PACKAGE, version)
    except UnsupportedVersion as error:
        make(work, base, partial(unpack, wheel, PACKAGE, version))
        click.echo(f"Initialized {work}: {PACKAGE} {version}; {error.what}")
        return
    make(work, base, partial(unpack, wheel, PACKAGE, version))
    click.echo(f"Initialized {work}: {PACKAGE} {version}, {replay(work, series)} patches of {series.name}")


@fork.command(short_help="Merge a series onto a work tree")
@work_option
@click.option("--from", "source", metavar="SERIES", help="The series to port: its name, or its directory.")
@click.option("--to", "version", metavar="VERSION", help="Make the work tree first, of this release.")
@click.option("--stage", "stages", multiple=True, metavar="STAGE", help="Port this stage only. Repeatable.")
@click.option("--patch", "names", multiple=True, metavar="NAME", help="Port this patch only. Repeatable.")
@click.option("--continue", "go_on", is_flag=True, help="Continue after you resolved and added conflicts.")
@wheels_option
def port(
    work: Path,
    source: str | None,
    version: str | None,
    stages: tuple[str, ...],
    names: tuple[str, ...],
    go_on: bool,
    wheels: Path | None,
) -> None:
    """Merge a series three-way onto a work tree, patch by patch.

    A patch that does not merge stops the port (exit code 4) with git's conflict markers and index. Resolve, git add,
    and run it with --continue.
    """
    if go_on == bool(source) or (go_on and (version or stages or names)):
        raise UsageProblem("give either --from SERIES or --continue", where="fork port", next_step="see --help")
    if go_on:
        _merged(work, porting.Ported(porting.go_on(work), {}))
        return
    series = _series(source or "")
    chosen = _wanted(series, stages, names)
    wheel = find_wheel(series.package, series.versions[0], wheels)
    if version:
        target = find_wheel(series.package, version, wheels)
        make(work, Base(series.package, version), partial(unpack, target, series.package, version))
    base = base_of(work)
    click.echo(f"Porting {series.name} to {base.package} {base.version} in {work}", err=True)
    _merged(work, porting.start(work, series, wheel, chosen))


@fork.command(short_help="Write the commits as a checked series")
@work_option
@click.option("--series", "directory", required=True, type=FOLDER, help="Where the series is written.")
def export(work: Path, directory: Path) -> None:
    """Write the commits of a work tree as a series, with hashes and stages, and load it to check it."""
    series = export_series(work, directory)
    stages = ", ".join(stage.name for stage in series.stages)
    click.echo(f"Exported {directory}: {len(series.patches)} patches, {len(series.files)} files, stages {stages}")


def _series(named: str) -> Series:
    if (Path(named) / SETTINGS).is_file():
        return load_series(Path(named).resolve())
    known = {series.name: series for series in catalogue()}
    if named not in known:
        raise UsageProblem(f"no series {named!r}", where="--from", next_step=f"name one of: {', '.join(known)}")
    return known[named]


def _wanted(series: Series, stages: tuple[str, ...], names: tuple[str, ...]) -> set[str]:
    """The names of the patches to port: those of the stages and those named; all, if nothing is named."""
    every = {patch.name: patch.stage for patch in series.patches}
    of = {name: series.stage_called(name) for name in stages}
    unknown = [name for name in names if name not in every] + [name for name, stage in of.items() if stage is None]
    if unknown:
        raise UsageProblem(
            f"{series.name} has no {unknown[0]!r}",
            where="fork port",
            next_step=f"its stages are {', '.join(series.states[1:])}, its patches {', '.join(every)}",
        )
    return {name for name, stage in every.items() if stage in of.values() or name in names} or set(every)


def _merged(work: Path, ported: porting.Ported) -> None:
    """What the work tree has now, patch by patch."""
    for name in git(work, "log", "--reverse", "--format=%s", f"{BASE}..HEAD").decode().split():
        click.echo(f"{name:.<60}Merged")
    for name in ported.obsolete:
        click.echo(f"{name:.<60}Skipped (nothing of it is left to do)")
    for name, paths in ported.left_out.items():
        click.echo(f"left out of {name}: {', '.join(paths)} (another patch creates it)")
    click.echo(f"next: test it, then ddtree-patch fork export --work {work} --series DIR")
