#!/usr/bin/env python3
"""Pin every series of patches/ anew and check each against its real wheels, after an edit of what they share.

\b
ddtree-patch fork init 0.5.17 --work DIR          # a release and its series, one commit a patch
(edit in DIR; commits keep their form: git commit --fixup, git rebase --autosquash pristine)
scripts/refresh_series.py --work DIR              # commits -> patches/, then every other series

Without --work, the patches are taken as they lie there. SERIES are the names of those to refresh; all without.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from patcher.errors import DdtreePatchError, SeriesProblem  # noqa: E402
from patcher.series.catalogue import catalogue  # noqa: E402
from patcher.series.export import export  # noqa: E402
from patcher.series.refresh import repin, unused  # noqa: E402
from patcher.series.releases import find_wheel  # noqa: E402
from patcher.series.settings import SETTINGS, read_settings  # noqa: E402
from patcher.series.worktree import base_of  # noqa: E402

FOLDER = click.Path(file_okay=False, resolve_path=True, path_type=Path)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", metavar="[SERIES]...", nargs=-1)
@click.option("--work", type=FOLDER, help="Export this work tree first; its shared patches replace those of the core.")
@click.option("--wheels", type=FOLDER, help="Wheels of the releases; without it the cache, filled by pip.")
@click.option("--patches", default=ROOT / "patches", type=FOLDER)
def main(names: tuple[str, ...], work: Path | None, wheels: Path | None, patches: Path) -> None:
    failed: list[DdtreePatchError] = []
    try:
        if work:
            exported = export(work, directory_of(work, patches), replace_core=True)
            click.echo(f"{exported.name}: exported, {len(exported.patches)} patches, {len(exported.files)} files")
        for directory in sorted(path.parent for path in patches.glob(f"*/{SETTINGS}")):
            if names and directory.name not in names:
                continue
            before = (directory / SETTINGS).read_bytes()
            try:
                repin(directory, partial(find_wheel, wheels=wheels))
            except DdtreePatchError as error:
                failed.append(error)
                told(error, directory.name)
                continue
            changed = (directory / SETTINGS).read_bytes() != before
            click.echo(f"{directory.name}: {'pinned anew' if changed else 'unchanged'}, checked against its wheels")
        if not failed:
            for path in unused(patches, catalogue(patches)):
                raise SeriesProblem("no series uses this patch", where=str(path), next_step="remove it")
    except DdtreePatchError as error:
        failed.append(error)
        told(error)
    sys.exit(failed[0].exit_code if failed else 0)


def directory_of(work: Path, patches: Path) -> Path:
    """Where the series of the work tree's release lies, or is to lie."""
    base = base_of(work)
    for path in sorted(patches.glob(f"*/{SETTINGS}")):
        settings = read_settings(path.parent)
        if settings.package == base.package and base.version in settings.versions:
            return path.parent
    return patches / f"{base.package}-{base.version}"


def told(error: DdtreePatchError, name: str = "") -> None:
    click.echo(f"{name}: {error}" if name else str(error), err=True)
    for text in (error.detail, error.next_step and f"  next: {error.next_step}"):
        if text:
            click.echo(text, err=True)


if __name__ == "__main__":
    main()
