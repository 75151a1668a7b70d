"""Compiled files of changed sources: the old ones must go, or old code may run.

Python trusts a compiled file when the source's size and its time in whole seconds fit,
and an unchecked-hash one whatever the source says.
"""

from __future__ import annotations

import errno
import os
import py_compile
from collections.abc import Container, Iterable, Mapping

from .backups import BACKUPS
from .failures import Refusal
from .files import describe, hash_of, link, remove_empty, sync_directory, unlink, write_file
from .site import Site


def compiled_files(source: str, prefixes: Iterable[str]) -> list[str]:
    """Compiled files of SOURCE, of every interpreter, in its own cache and below each PYTHONPYCACHEPREFIX given."""
    folder, name = os.path.split(source)
    stem, extension = os.path.splitext(name)
    if extension != ".py":
        return []
    found = [source + "c"] if os.path.isfile(source + "c") else []
    for cache in [os.path.join(folder, "__pycache__"), *(os.path.join(p, folder.lstrip("/")) for p in prefixes)]:
        if os.path.isdir(cache):
            found += [os.path.join(cache, entry) for entry in sorted(os.listdir(cache))
                      if entry.startswith(stem + ".") and entry.endswith(".pyc")]
    return found


def snapshot(site: Site, sources: Mapping[str, str], prefixes: Iterable[str]) -> dict[str, dict]:
    """Name of each compiled file (see Site.shorten) -> its description, hash ("sha") and source's name ("source").

    sources: name -> absolute path. Compiled files elsewhere (PYTHONPYCACHEPREFIX) are left out: Python makes them
    again, and nothing is written outside the package.
    """
    return {site.shorten(compiled): dict(describe(compiled), sha=hash_of(compiled), source=name)
            for name, file in sources.items() for compiled in compiled_files(file, prefixes) if site.holds(compiled)}


def remove(sources: Iterable[str], prefixes: Iterable[str]) -> None:
    """Remove the compiled files of the sources, for good: a power loss must not bring one back."""
    for source in sources:
        found = compiled_files(source, prefixes)
        for compiled in found:
            unlink(compiled)
        for folder in {os.path.dirname(compiled) for compiled in found}:
            sync_directory(folder)
        remove_caches([source])


def remove_caches(sources: Iterable[str]) -> None:
    """Remove the caches beside SOURCES that are empty."""
    remove_empty({os.path.join(os.path.dirname(source), "__pycache__") for source in sources})


def restore(site: Site, saved: Mapping[str, dict], needed: Container[str]) -> None:
    """Bring compiled files of a snapshot back from the backups; those that are not NEEDED any more take no space.

    One for which there is no space, or whose backup is gone, is left out: Python compiles it again.
    """
    for name, value in saved.items():
        path = site.lengthen(name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _restore(site, path, value, value["sha"] in needed)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            unlink(path)
        except Refusal:
            continue


def _restore(site: Site, path: str, value: dict, needed: bool) -> None:
    data = site.backup(value["sha"])
    if needed or not link(site.state(BACKUPS, value["sha"]), path):  # nobody writes into a compiled file in place
        write_file(path, data, value)
    else:
        os.chown(path, value["uid"], value["gid"])
        os.chmod(path, value["mode"] & 0o777)


def compile_file(source: str) -> None:
    """Byte-compile SOURCE for this interpreter; what is written belongs to the owner of the source."""
    compiled = py_compile.compile(source, doraise=True)
    info = os.stat(source)
    for path in (compiled, os.path.dirname(compiled)):
        if os.stat(path).st_uid != info.st_uid:
            os.chown(path, info.st_uid, info.st_gid)
