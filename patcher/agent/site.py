"""Where the package is installed, and where its state is kept."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import stat
import sys
from typing import Any

from .failures import Refusal
from .files import opened, read, sha256, sync_directory

STATE_DIRECTORY = ".ddtree-patch"

# What is relied upon in the state files, by name: keys, and the keys of their values.
SHAPES: dict[str, dict[str, Any]] = {
    "receipt.json": {
        "files": {},
        "host": dict.fromkeys(("installation", "record", "seen", "meta", "bytecode", "directories", "commit_time")),
    },
    "journal.json": dict.fromkeys(
        (
            "phase",
            "installation",
            "entries",
            "bytecode",
            "prefixes",
            "made_directories",
            "old_directories",
            "receipt",
            "history",
        )
    ),
    "state.json": {},
}


class Site:
    """One installation of the package.

    root: the directory on the import path. package_dir: the package's real directory. dist_info: its
    metadata directory. record: path of RECORD, None if there is none that lists the package's files.
    tree: a directory without interpreter. requires: the Requires-Python of the package. Raises Refusal
    (NoInstallation) on construction, saying what was looked for.
    """

    def __init__(self, package: str, site_packages: str | None):
        self.package = package
        self.tree = site_packages is not None
        if self.tree:
            self.root = os.path.abspath(site_packages)
            places, prefix = [self.root], self.root
            if not os.path.isfile(os.path.join(self.root, package, "__init__.py")):
                raise Refusal(
                    "NoInstallation",
                    f"there is no {package} here: looked for {package}/__init__.py and {package}-*.dist-info",
                    self.root,
                    "give the directory that holds the package (often .../site-packages)",
                )
        else:
            places, prefix = [place for place in sys.path if os.path.isdir(place)], sys.prefix
            spec = importlib.util.find_spec(package)
            if spec is None or not spec.submodule_search_locations:
                raise Refusal(
                    "NoInstallation",
                    f"{sys.executable} has no {package}: looked in {', '.join(places)}",
                    sys.prefix,
                    "give the environment that serves: --venv",
                )
            self.root = os.path.dirname(os.path.abspath(next(iter(spec.submodule_search_locations))))
        self.package_dir = os.path.realpath(os.path.join(self.root, package))
        found, headers = self._metadata(places)
        self.dist_info = os.path.join(os.path.realpath(os.path.dirname(found)), os.path.basename(found))
        self.version = headers["version"]
        self.requires = headers.get("requires-python", "")
        self.editable = os.path.realpath(os.path.dirname(self.dist_info)) != os.path.realpath(self.root)
        record = os.path.join(self.dist_info, "RECORD")
        self.record = record if not self.editable and os.path.isfile(record) else None
        self.state_dir = os.path.join(os.path.realpath(prefix), STATE_DIRECTORY, package)

    def _metadata(self, places: list[str]) -> tuple[str, dict[str, str]]:
        """The metadata directory of the package and its headers (names in lower case)."""
        for place in places:
            found = [
                (folder, headers)
                for folder, headers in map(_headers, self._metadata_directories(place))
                if _normal(headers.get("name", "")) == _normal(self.package) and "version" in headers
            ]
            if len(found) > 1:
                names = ", ".join(os.path.basename(folder) for folder, _ in found)
                raise Refusal(
                    "NoInstallation",
                    f"two versions of {self.package} are recorded: {names}",
                    place,
                    "reinstall the package, so that one remains",
                )
            if found:
                return found[0]
        raise Refusal(
            "NoInstallation",
            f"{self.package} is in {self.package_dir}, but its metadata is not: looked for "
            f"{self.package}-*.dist-info/METADATA in {', '.join(places)}",
            self.root,
            "reinstall the package",
        )

    def _metadata_directories(self, place: str) -> list[str]:
        return [
            os.path.join(place, name)
            for name in sorted(os.listdir(place))
            if name.endswith((".dist-info", ".egg-info")) and _normal(name).startswith(_normal(self.package))
        ]

    def locate(self, path: str, folder: bool = False) -> str:
        """The absolute path for PATH, relative to the import root; of a file, or with `folder` of anything.

        Links below the package are not followed.
        """
        parts = path.split("/")
        if parts[0] != self.package or len(parts) < 2 or any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise Refusal(
                "Conflict", f"the path does not lie in the package {self.package}", path, "correct the series"
            )
        here = self.package_dir
        for part in parts[1:-1]:
            here = os.path.join(here, part)
            if os.path.islink(here) or (os.path.lexists(here) and not os.path.isdir(here)):
                raise Refusal(
                    "Conflict",
                    f"a directory of the package is a link or a file: {here}",
                    path,
                    "reinstall the package with real directories",
                )
        here = os.path.join(here, parts[-1])
        if not folder and os.path.lexists(here) and not os.path.isfile(here):
            raise Refusal("Drift", "this is no regular file", here, "reinstall the package")
        return here

    def holds(self, file: str) -> bool:
        """Whether an absolute path lies in the package."""
        return file.startswith(self.package_dir + os.sep)

    def shorten(self, file: str) -> str:
        """The name of a path of the package that stays true when the installation is moved."""
        return self.package + file[len(self.package_dir) :]

    def lengthen(self, name: str) -> str:
        """The absolute path of such a name. State files can be anyone's: a name that leads elsewhere is a Refusal."""
        return self.locate(name, folder=True)

    @property
    def identity(self) -> list[str]:
        """What tells one installation of the package from another."""
        return [self.version, os.path.basename(self.dist_info)]

    def state(self, *names: str) -> str:
        return os.path.join(self.state_dir, *names)

    def load(self, name: str) -> Any:
        """A JSON file of the state directory, None without one. One that others may have written is a Refusal."""
        data = read(self.state(name))
        if data is None:
            return None
        for path in (self.state_dir, self.state(name)):
            self.must_be_private(path)
        try:
            value = json.loads(data)
            if not _has(value, SHAPES.get(name, {})):
                raise ValueError("it is not what this tool writes")
        except ValueError as error:
            raise Refusal(
                "Conflict",
                f"this file is damaged: {error}",
                self.state(name),
                f"restore it; or reinstall {self.package} and remove {self.state_dir}",
            ) from error
        return value

    def must_be_private(self, path: str) -> None:
        """Raises Refusal where somebody else may have written a state file or directory, or a link leads to it."""
        info = os.lstat(path)
        owners = {os.geteuid(), 0, os.stat(self.package_dir).st_uid}
        if info.st_uid not in owners or info.st_mode & 0o022 or stat.S_ISLNK(info.st_mode):
            raise Refusal(
                "Conflict",
                "the state of an earlier run is not private: others may have written it",
                path,
                f"look into it; if it is yours: chown -R {os.geteuid()} and chmod -R go-rwx it",
            )

    def make_private(self, folder: str) -> None:
        """Make a directory of the state, for this account alone. Raises OSError, and Refusal if another's is there."""
        above, name = os.path.split(folder)
        with contextlib.suppress(FileExistsError), opened(above) as handle:
            os.mkdir(name, 0o700, dir_fd=handle)
            sync_directory(above)
        self.must_be_private(folder)

    def backup(self, sha: str) -> bytes:
        """The bytes kept under their hash. A damaged or missing backup is a Refusal."""
        data = read(self.state("backups", sha))
        if data is None or sha256(data) != sha:
            raise Refusal(
                "Conflict",
                f"the backup {sha} is {'gone' if data is None else 'damaged'}",
                self.state("backups"),
                "reinstall the package; the receipt is stale then and can be dropped",
            )
        return data


def _has(value: Any, shape: dict[str, Any]) -> bool:
    """Whether VALUE is an object that has the keys of SHAPE, and so on below; None stands for any value."""
    return isinstance(value, dict) and all(
        key in value and (inner is None or _has(value[key], inner)) for key, inner in shape.items()
    )


def _headers(folder: str) -> tuple[str, dict[str, str]]:
    data = read(os.path.join(folder, "METADATA")) or read(os.path.join(folder, "PKG-INFO")) or b""
    head = data.replace(b"\r\n", b"\n").split(b"\n\n")[0].decode("utf-8", "replace")
    lines = (line.partition(":") for line in head.split("\n"))
    return folder, {key.lower(): value.strip() for key, colon, value in lines if colon}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
