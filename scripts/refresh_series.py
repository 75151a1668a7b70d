#!/usr/bin/env python3
"""Keep a patch series as commits: make a git work tree of a release and its series, or write the series from it.

scripts/refresh_series.py 0.5.11 --work DIR --init      # pristine release, then one commit a patch
(edit in DIR, commit: subject = patch name, body = what it is for, trailer "Stage: ddtree" or "Stage: temperature")
scripts/refresh_series.py 0.5.11 --work DIR             # commits -> patches/sglang-0.5.11/
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from patcher.errors import DdtreePatchError  # noqa: E402
from patcher.series import worktree  # noqa: E402


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("version")
@click.option("--work", required=True, type=click.Path(file_okay=False, path_type=Path), help="The git work tree.")
@click.option("--init", "make", is_flag=True, help="Make the work tree instead of exporting from it.")
@click.option("--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The release's wheel.")
@click.option("--package", default="sglang", show_default=True)
@click.option("--patches", default=ROOT / "patches", type=click.Path(file_okay=False, path_type=Path))
def main(version: str, work: Path, make: bool, wheel: Path | None, package: str, patches: Path) -> None:
    series_dir = patches / f"{package}-{version}"
    try:
        if not make:
            series = worktree.export(work, package, version, series_dir)
            click.echo(f"{series_dir}: {len(series.patches)} patches, {len(series.files)} files")
            return
        with tempfile.TemporaryDirectory() as directory:
            source = wheel or worktree.download_wheel(package, version, Path(directory))
            count = worktree.init(work, source, package, version, series_dir)
        click.echo(f"{work}: {package} {version} and {count} patches")
    except DdtreePatchError as error:
        click.echo(f"{error}\n{error.detail}{error.next_step}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
