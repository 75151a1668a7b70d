"""Compiled files of changed sources: the old ones must go, or old code may run.

Python trusts a compiled file when the source's size and its time in whole seconds fit,
and an unchecked-hash one whatever the source says.
"""

from __future__ import annotations

import errno
import importlib.util
import marshal
import os
import struct
from collections.abc import Container, Iterable, Mapping

from .backups import BACKUPS
from .failures import Refusal
from .files import (
    describe,
    entries,
    give,
    hash_of,
    link,
    make_directories,
    read,
    remove_empty,
    sync_directory,
    unlink,
    write_file,
)
from .site import Site


def compiled_files(source: str, prefixes: Iterable[str]) -> list[str]:
    """Compiled files of SOURCE, of every interpreter, in its own cache and below each PYTHONPYCACHEPREFIX given."""
    folder, name = os.path.split(source)
    stem, extension = os.path.splitext(name)
    if extension != ".py":
        return []
    found = [source + "c"] if os.path.isfile(source + "c") else []
    for cache in [
        os.path.join(folder, "__pycache__"),
        *(os.path.join(os.path.realpath(prefix), folder.lstrip("/")) for prefix in prefixes),
    ]:
        try:
            found += [
                os.path.join(cache, entry)
                for entry in entries(cache)
                if entry.startswith(stem + ".") and entry.endswith(".pyc")
            ]
        except NotADirectoryError as error:
            raise Refusal(
                "Conflict",
                "a directory of compiled files is a link or a file",
                cache,
                "remove it: Python makes it anew",
            ) from error
    return found


def snapshot(site: Site, sources: Mapping[str, str], prefixes: Iterable[str]) -> dict[str, dict]:
    """Name of each compiled file (see Site.shorten) -> its description, hash ("sha") and source's name ("source").

    sources: name -> absolute path. Compiled files elsewhere (PYTHONPYCACHEPREFIX) are left out: Python makes them
    again, and nothing is written outside the package.
    """
    return {
        site.shorten(compiled): dict(describe(compiled), sha=hash_of(compiled), source=name)
        for name, file in sources.items()
        for compiled in compiled_files(file, prefixes)
        if site.holds(compiled)
    }


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
            make_directories(os.path.dirname(path))
            _restore(site, path, value, value["sha"] in needed)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            unlink(path)
        except Refusal:
            continue


def _restore(site: Site, path: str, value: dict, needed: bool) -> None:
    data = site.backup(value["sha"])
    if not needed:  # nobody writes into a compiled file in place
        give(site.state(BACKUPS, value["sha"]), value["uid"], value["gid"], value["mode"])
        if link(site.state(BACKUPS, value["sha"]), path):
            return
    write_file(path, data, value)


def compile_file(source: str) -> None:
    """Byte-compile SOURCE for this interpreter; what is written belongs to the owner of the source.

    As py_compile does it, which would follow links.
    """
    info, data = os.stat(source), read(source)
    code = compile(data, source, "exec", dont_inherit=True)
    head = struct.pack("<III", 0, int(info.st_mtime) & 0xFFFFFFFF, len(data) & 0xFFFFFFFF)  # PEP 552: by time and size
    path = importlib.util.cache_from_source(source)
    make_directories(os.path.dirname(path))
    write_file(path, importlib.util.MAGIC_NUMBER + head + marshal.dumps(code), dict(describe(source), mtime_ns=None))
