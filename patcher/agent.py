"""The program that runs on the host: it looks, and it changes files all or nothing.

One file, standard library only, CPython 3.9 or later. It is sent over standard
input, followed by one JSON request, and answers with one framed JSON reply. It
decides nothing: it is given complete new files and the sha256 that each old
file must still have, and ends with all of the old or all of the new. What it
does in which order is the list STEPS; whatever kills it, the journal tells the
next run whether to undo or to finish.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import csv
import errno
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import io
import json
import os
import py_compile
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
import traceback
import uuid
import warnings

STATE_DIRECTORY = ".ddtree-patch"
NEW, OLD = ".ddtree-new", ".ddtree-old"  # suffixes of the files kept beside a target while a commit is under way
STATE_FILES = ("receipt.json", "history.jsonl", "state.json")

# The steps of a commit, in order. Those marked n happen once a file.
STEPS = (
    "lock",       # taken; a dead holder's lock is taken over
    "check",      # old hashes, syntax, mounts, permissions: everything that can be refused, before anything is written
    "backup",     # old bytes, by content, into the state directory
    "journal",    # what is about to happen; from here on a death is undone
    "write",      # n: the new file beside the old one
    "rename",     # n: the old inode is kept under another name, then the new file takes the path
    "record",     # the distribution's RECORD, the same way
    "bytecode",   # compiled files of the old sources are removed
    "compile",    # and those of the new ones written
    "import",     # the named modules import in a fresh interpreter
    "read-back",  # every file is what it should be
    "decide",     # the journal says "committed"; from here on a death is finished
    "receipt",
    "history",
    "clean",      # old inodes and backups that nothing needs any more
    "drop",       # the journal is gone
    "unlock",
)


# ---------------------------------------------------------------- failures

class Refusal(Exception):
    """An expected failure: KIND is the name of the operator side's error class."""

    def __init__(self, kind, what, where="", next_step="", **more):
        super().__init__(what)
        self.kind = kind
        self.reply = {"kind": kind, "what": what, "where": where, "next": next_step, **more}


def os_refusal(error, path):
    """The Refusal for an OSError on PATH, naming the mount where that is the cause."""
    mount = mount_of(path)
    code = error.errno
    if code == errno.EROFS:
        return Refusal("Conflict", "the file system is read-only", path,
                       "mount %s writable, or patch the image that it comes from" % mount, mount=mount)
    if code == errno.EBUSY:
        return Refusal("Conflict", "the path is a mount point and cannot be replaced", path,
                       "change the file where it is mounted from, or remove the mount %s" % mount, mount=mount)
    if code in (errno.ENOSPC, errno.EDQUOT):
        return Refusal("Conflict", "no space is left", path, "free some space on %s" % mount, mount=mount)
    if code in (errno.EACCES, errno.EPERM):
        return Refusal("Conflict", "no permission to change this as %s" % user_name(os.geteuid()), path,
                       "connect as the owner, or set sudo = true for this host", mount=mount)
    return Refusal("Conflict", "the file system refuses: %s" % error, path, "look at the file system", mount=mount)


def step(name, seen={}):  # the shared default is the counter
    """Mark that a step is reached. Tests kill the agent here: DDTREE_AGENT_DIE_AT=<step>[:n], n from 1."""
    seen[name] = seen.get(name, 0) + 1
    wanted, _, number = os.environ.get("DDTREE_AGENT_DIE_AT", "").partition(":")
    if wanted == name and seen[name] == int(number or 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return name


# ---------------------------------------------------------------- files

def sha256(data):
    return hashlib.sha256(data).hexdigest()


def read(path):
    """The bytes of a file, None when there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def hash_of(path):
    data = read(path)
    return None if data is None else sha256(data)


def sync_directory(path):
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unlink(path):
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def user_name(uid):
    try:
        import pwd
        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)


def describe(path):
    """What a revert needs beside the bytes: mode, owner, time, and where a link pointed."""
    info = os.stat(path)
    link = os.readlink(path) if os.path.islink(path) else None
    return {"mode": stat.S_IMODE(info.st_mode), "uid": info.st_uid, "gid": info.st_gid, "mtime_ns": info.st_mtime_ns,
            "link": link}


def write_file(path, data, meta, like=None):
    """Create PATH with DATA, mode and owner of META and the extended attributes of the file LIKE, on disk for good."""
    unlink(path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(handle, "wb") as file:
        file.write(data)
        if like is not None:
            copy_attributes(like, path)
        info = os.fstat(handle)
        if (info.st_uid, info.st_gid) != (meta["uid"], meta["gid"]):
            os.fchown(handle, meta["uid"], meta["gid"])
        os.fchmod(handle, meta["mode"])
        file.flush()
        if meta.get("mtime_ns") is not None:
            os.utime(handle, ns=(meta["mtime_ns"], meta["mtime_ns"]))
        os.fsync(handle)


def copy_attributes(source, target):
    for name in os.listxattr(source):
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError as error:
            # Without privileges the kernel sets the security labels itself, from the directory.
            if error.errno != errno.ENOTSUP and not name.startswith("security."):
                raise


def write_state(path, data):
    """Write a file of the state directory: private, whole or not at all."""
    beside = path + NEW
    try:
        write_file(beside, data, {"mode": 0o600, "uid": os.geteuid(), "gid": os.getegid()})
        os.rename(beside, path)
    except OSError as error:
        unlink(beside)
        raise os_refusal(error, path)
    sync_directory(os.path.dirname(path))


def mounts():
    """Mount points of this machine as this process sees them."""
    data = read("/proc/self/mountinfo") or b""
    fields = [line.split(b" ")[4] for line in data.split(b"\n") if line]
    return [os.fsdecode(re.sub(rb"\\(\d{3})", lambda code: bytes([int(code[1], 8)]), field)) for field in fields]


def mount_of(path):
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    around = [point for point in mounts() if real == point or real.startswith(point.rstrip("/") + "/")]
    return max(around, key=len) if around else "/"


def write_problem(path):
    """Why PATH could not be replaced, or None. Nothing is written to find out."""
    if os.path.ismount(path) or os.path.realpath(path) in mounts():
        return {"path": path, "mount": mount_of(path), "errno": errno.EBUSY}
    folder = os.path.dirname(path)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return {"path": folder, "mount": mount_of(path), "errno": errno.EROFS}
    if not os.access(folder, os.W_OK | os.X_OK):
        return {"path": folder, "mount": mount_of(path), "errno": errno.EACCES}
    return None


# ---------------------------------------------------------------- the installation

class Site:
    """Where the package is, and where its state is kept.

    root: the directory on the import path. package_dir: the package's real directory. dist_info: its
    metadata directory. record: path of RECORD, None if there is none that lists the package's files.
    """

    def __init__(self, package, site_packages):
        self.package = package
        self.tree = site_packages is not None
        if self.tree:
            self.root = os.path.abspath(site_packages)
            places, prefix = [self.root], self.root
            if not os.path.isfile(os.path.join(self.root, package, "__init__.py")):
                raise Refusal("NoInstallation", "there is no %s here: looked for %s/__init__.py and %s-*.dist-info"
                              % (package, package, package), self.root,
                              "give the directory that holds the package (often .../site-packages)")
        else:
            places, prefix = [place for place in sys.path if os.path.isdir(place)], sys.prefix
            spec = importlib.util.find_spec(package)
            if spec is None or not spec.submodule_search_locations:
                raise Refusal("NoInstallation", "%s cannot import %s: looked in %s"
                              % (sys.executable, package, ", ".join(places)), sys.prefix,
                              "give the environment that serves: --venv")
            self.root = os.path.dirname(os.path.abspath(list(spec.submodule_search_locations)[0]))
        self.package_dir = os.path.realpath(os.path.join(self.root, package))
        self.dist_info, headers = self.metadata(places)
        self.version = headers["version"]
        self.requires = headers.get("requires-python", "")
        self.editable = os.path.realpath(os.path.dirname(self.dist_info)) != os.path.realpath(self.root)
        record = os.path.join(self.dist_info, "RECORD")
        self.record = record if not self.editable and os.path.isfile(record) else None
        self.state_dir = os.path.join(prefix, STATE_DIRECTORY, package)

    def metadata(self, places):
        """The metadata directory of the package and its headers (names in lower case)."""
        for place in places:
            found = []
            for name in sorted(os.listdir(place)):
                for suffix, file in ((".dist-info", "METADATA"), (".egg-info", "PKG-INFO")):
                    data = read(os.path.join(place, name, file)) if name.endswith(suffix) and name[0] != "~" else None
                    head = (data or b"").split(b"\n\n")[0].decode("utf-8", "replace")
                    headers = {key.lower(): value.strip() for key, colon, value
                               in (line.partition(":") for line in head.splitlines()) if colon}
                    if re.sub(r"[-_.]+", "-", headers.get("name", "")).lower() == self.package.replace("_", "-"):
                        found.append((os.path.join(place, name), headers))
            if len(found) > 1:
                raise Refusal("NoInstallation", "two versions of %s are recorded: %s"
                              % (self.package, ", ".join(os.path.basename(path) for path, _ in found)), place,
                              "reinstall the package, so that one remains")
            if found:
                return found[0]
        raise Refusal("NoInstallation", "%s is in %s, but its metadata is not: looked for %s-*.dist-info/METADATA in %s"
                      % (self.package, self.package_dir, self.package, ", ".join(places)), self.root,
                      "reinstall the package")

    def locate(self, path):
        """The absolute path for PATH, relative to the import root. Links below the package are not followed."""
        parts = path.split("/")
        if parts[0] != self.package or len(parts) < 2 or any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise Refusal("Conflict", "the path does not lie in the package %s" % self.package, path, "correct the series")
        here = self.package_dir
        for part in parts[1:-1]:
            here = os.path.join(here, part)
            if os.path.islink(here) or (os.path.lexists(here) and not os.path.isdir(here)):
                raise Refusal("Conflict", "a directory of the package is a link or a file: %s" % here, path,
                              "reinstall the package with real directories")
        here = os.path.join(here, parts[-1])
        if os.path.lexists(here) and not os.path.isfile(here):
            raise Refusal("Drift", "this is no regular file", here, "reinstall the package")
        return here

    def state(self, *names):
        return os.path.join(self.state_dir, *names)

    def load(self, name):
        data = read(self.state(name))
        return None if data is None else json.loads(data)

    def backup(self, sha):
        """The bytes kept under their hash. A damaged or missing backup is a Refusal."""
        data = read(self.state("backups", sha))
        if data is None or sha256(data) != sha:
            raise Refusal("Conflict", "the backup %s is %s" % (sha, "gone" if data is None else "damaged"),
                          self.state("backups"), "reinstall the package; then `forget` drops the receipt")
        return data


# ---------------------------------------------------------------- RECORD

def record_lines(data):
    """path -> (line with its end, hash as hex or None) in the order of the file."""
    lines = {}
    for line in data.splitlines(keepends=True):
        row = next(csv.reader([line.decode("utf-8", "surrogateescape")]), [])
        if not row:
            continue
        algorithm, _, value = (row[1] if len(row) > 1 else "").partition("=")
        digest = None
        if algorithm == "sha256":
            with contextlib.suppress(binascii.Error):
                digest = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
        lines[row[0]] = (line, digest)
    return lines


def rewrite_record(data, files, listed):
    """RECORD with new lines for FILES and with exactly the state files LISTED.

    files: path -> new bytes, or None for a file that is gone. listed: paths without hash. Lines of other
    files keep their bytes.
    """
    end = b"\r\n" if b"\r\n" in data else b"\n"
    if data and not data.endswith((b"\n", b"\r")):
        data += end
    lines = {path: line for path, (line, _) in record_lines(data).items() if STATE_DIRECTORY not in path.split("/")}

    def line(*row):
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(row)
        return text.getvalue().encode("utf-8", "surrogateescape") + end

    for path, content in files.items():
        if content is None:
            lines.pop(path, None)
        else:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines[path] = line(path, "sha256=" + digest, len(content))
    for path in listed:
        lines[path] = line(path, "", "")
    return b"".join(lines.values())


# ---------------------------------------------------------------- bytecode

def bytecode_of(file, prefixes):
    """Compiled files of the source FILE, of every interpreter, in its own cache and below each cache prefix."""
    folder, name = os.path.split(file)
    stem, extension = os.path.splitext(name)
    if extension != ".py":
        return []
    caches = [os.path.join(folder, "__pycache__")]
    caches += [os.path.join(prefix, folder.lstrip("/")) for prefix in prefixes if prefix]
    found = [file + "c"] if os.path.isfile(file + "c") else []
    for cache in caches:
        if os.path.isdir(cache):
            found += [os.path.join(cache, entry) for entry in sorted(os.listdir(cache))
                      if entry.startswith(stem + ".") and entry.endswith(".pyc")]
    return found


def remove_bytecode(files, prefixes):
    for file in files:
        for compiled in bytecode_of(file, prefixes):
            unlink(compiled)
        with contextlib.suppress(OSError):  # a cache with other files in it stays
            os.rmdir(os.path.join(os.path.dirname(file), "__pycache__"))


# ---------------------------------------------------------------- the lock

def boot_id():
    return (read("/proc/sys/kernel/random/boot_id") or b"").decode().strip()


def start_ticks(pid):
    """Start time of a process in clock ticks since boot, None when it does not run."""
    data = read("/proc/%d/stat" % pid)
    if data is None:
        return None
    fields = data.rsplit(b")", 1)[1].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def lock_holder(site):
    """Who holds the lock and is alive, None otherwise."""
    data = read(site.state("lock"))
    if not data:
        return None
    holder = json.loads(data)
    alive = holder["boot_id"] == boot_id() and start_ticks(holder["pid"]) == holder["start_ticks"]
    return holder if alive else None


@contextlib.contextmanager
def locked(site, who):
    """Hold the lock of the installation. Raises Locked, naming the holder."""
    path = site.state("lock")
    handle = acquire(site, path)
    try:
        holder = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "boot_id": boot_id(),
                  "host": socket.gethostname(), "who": who, "since": time.time()}
        os.pwrite(handle, json.dumps(holder).encode(), 0)
        step("lock")
        yield
        step("unlock")
    finally:
        unlink(path)
        os.close(handle)
        with contextlib.suppress(OSError):  # only an empty state directory goes
            os.rmdir(site.state("backups"))
        with contextlib.suppress(OSError):
            os.rmdir(site.state_dir)
            os.rmdir(os.path.dirname(site.state_dir))


def acquire(site, path):
    while True:
        try:
            os.makedirs(site.state_dir, mode=0o700, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # the last holder removed the empty directory just now
        except OSError as error:
            raise os_refusal(error, path)
        try:
            # The kernel gives up a dead holder's lock by itself; who it says it is only matters for the message,
            # and where the file was copied or the file system does not lock across machines.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise held(path, read(path))
        if not os.path.exists(path) or os.stat(path).st_ino != os.fstat(handle).st_ino:
            os.close(handle)  # removed by its holder between our open and our lock
            continue
        if lock_holder(site):
            os.close(handle)
            raise held(path, read(path))
        os.ftruncate(handle, 0)
        return handle


def held(path, data):
    holder = json.loads(data) if data else {}
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"])) if holder else "just now"
    return Refusal("Locked", "%s holds the lock since %s (process %s on %s)"
                   % (holder.get("who", "someone"), since, holder.get("pid", "?"), holder.get("host", "?")),
                   path, "wait until it ends; a dead holder's lock is taken over by itself", holder=holder)


# ---------------------------------------------------------------- the transaction

class Entry:
    """One path of a commit: what it must be before, what it is after.

    path: relative to the import root, "RECORD" for the distribution's. file: absolute. meta: describe() of
    the file that goes, None where there is none.
    """

    def __init__(self, path, file, before, after, data=None, meta=None):
        self.path, self.file, self.before, self.after, self.data, self.meta = path, file, before, after, data, meta
        folder, name = os.path.split(file)
        self.new, self.old = os.path.join(folder, "." + name + NEW), os.path.join(folder, "." + name + OLD)

    def as_dict(self):
        return {"path": self.path, "file": self.file, "before": self.before, "after": self.after, "meta": self.meta}


def commit(site, request):
    """Change all files or none. See STEPS."""
    ignore_hangups()
    with locked(site, request.get("who", "")):
        step("check")
        old_receipt = site.load("receipt.json")
        stale = receipt_state(site, old_receipt) == "stale"
        host = {} if stale or old_receipt is None else old_receipt["host"]
        plan = Commit(site, request, host)
        plan.check(old_receipt, stale)
        try:
            plan.back_up()
            step("journal")
            write_state(site.state("journal.json"), json.dumps(plan.journal).encode())
        except BaseException:
            collect_backups(site)
            raise
        try:
            plan.write()
            plan.rename()
            plan.refresh_bytecode()
            plan.import_check()
            plan.read_back()
            step("decide")
            plan.journal["phase"] = "committed"
            write_state(site.state("journal.json"), json.dumps(plan.journal).encode())
        except BaseException:
            undo(site, load_journal(site))
            raise
        finish(site, plan.journal)
    return {"committed": True, "commit_time": plan.time, "record": plan.record_note,
            "read_back": {entry.path: entry.after for entry in plan.entries}, "steps": list(STEPS)}


class Commit:
    """What one commit does; its journal is all that a later run needs to undo or finish it."""

    def __init__(self, site, request, host):
        self.site, self.host = site, host
        self.actions = request["actions"]
        self.receipt = request.get("receipt")
        self.imports = request.get("imports") or []
        self.prefixes = [prefix for prefix in (*(request.get("pycache_prefixes") or ()),
                                               os.environ.get("PYTHONPYCACHEPREFIX")) if prefix]
        self.store = request.get("store") or {}
        self.time = time.time()
        self.id = uuid.uuid4().hex
        self.history = dict(request.get("history") or {}, id=self.id, time=self.time, who=request.get("who", ""))
        self.entries = []
        self.record_note = "none lists these files"

    # -- before anything is written

    def check(self, old_receipt, stale):
        drifted = []
        for action in self.actions:
            file = self.site.locate(action["path"])
            found = hash_of(file)
            if found != action["before"]:
                drifted.append({"path": action["path"], "expected": action["before"], "found": found})
                continue
            meta = describe(file) if found else self.host.get("meta", {}).get(action["path"])
            self.entries.append(Entry(action["path"], file, action["before"], action["after"], self.new_bytes(action), meta))
        if drifted:
            raise Refusal("Drift", "%d of %d files are not what they were when the plan was made: %s" % (
                len(drifted), len(self.actions), ", ".join(item["path"] for item in drifted)), self.site.root,
                "run the command again", files=drifted)
        self.sources = list(self.entries)
        for entry in self.sources:
            self.check_syntax(entry)
        self.directories = self.missing_directories()
        self.bytecode = {compiled: dict(describe(compiled), sha=hash_of(compiled), source=entry.path)
                         for entry in self.sources for compiled in bytecode_of(entry.file, self.prefixes)}
        self.complete_receipt()
        self.plan_record(old_receipt)
        self.check_revertible()
        for path in [entry.file for entry in self.entries] + [self.site.state("journal.json")]:
            problem = write_problem(path)
            if problem:
                raise os_refusal(OSError(problem["errno"], os.strerror(problem["errno"])), problem["path"])
        self.journal = {
            "id": self.id, "phase": "writing", "since": self.time, "history": self.history, "tree": self.site.tree,
            "entries": [entry.as_dict() for entry in self.entries], "directories": self.directories,
            "bytecode": self.bytecode, "prefixes": self.prefixes, "dist_info": self.site.dist_info,
            "receipt": self.receipt, "old_directories": [] if self.receipt else self.host.get("directories", []),
        }

    def new_bytes(self, action):
        if action["after"] is None:
            return None
        data = self.site.backup(action["after"]) if action.get("backup") else base64.b64decode(action["data"])
        if sha256(data) != action["after"]:
            raise Refusal("Conflict", "the new bytes do not have the hash that they should", action["path"],
                          "run the command again")
        return data

    def check_syntax(self, entry):
        minimum = re.search(r">=\s*(\d+)\.(\d+)", self.site.requires)
        too_old = minimum is not None and sys.version_info[:2] < (int(minimum[1]), int(minimum[2]))
        if entry.data is None or not entry.file.endswith(".py") or (self.site.tree and too_old):
            return  # an interpreter older than the package may patch a tree, but cannot judge it
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(entry.data, entry.file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise Refusal("Conflict", "the new file does not compile: %s" % error, entry.path, "correct the series")

    def missing_directories(self):
        missing = set()
        for entry in self.sources:
            folder = os.path.dirname(entry.file)
            while entry.after and not os.path.isdir(folder):
                missing.add(folder)
                folder = os.path.dirname(folder)
        return sorted(missing)

    def complete_receipt(self):
        """Add to the receipt what only the host knows and a revert needs."""
        if self.receipt is None:
            return
        files = self.receipt["files"]
        meta = {path: value for path, value in self.host.get("meta", {}).items() if path in files}
        bytecode = {path: value for path, value in self.host.get("bytecode", {}).items() if value["source"] in files}
        fresh = {entry.path for entry in self.sources if entry.path in files and entry.path not in self.host.get("seen", [])}
        for entry in self.sources:
            if entry.path in fresh and entry.before:
                meta[entry.path] = entry.meta
        bytecode.update({path: value for path, value in self.bytecode.items() if value["source"] in fresh})
        self.receipt["host"] = {
            "version": self.site.version, "dist_info": self.site.dist_info, "commit_time": self.time, "id": self.id,
            "user": user_name(os.geteuid()), "meta": meta, "bytecode": bytecode, "record": None,
            "seen": sorted(set(files) & (set(self.host.get("seen", [])) | {entry.path for entry in self.sources})),
            "directories": sorted({*self.host.get("directories", []), *self.directories}),
        }

    def plan_record(self, old_receipt):
        if self.site.record is None:
            return
        data = read(self.site.record)
        last = ((old_receipt or {}).get("host") or {}).get("record") or {}
        ours = last.get("after") == sha256(data)
        if self.receipt is None and ours:
            after, self.record_note = self.site.backup(last["before"]), "restored"
        else:
            files = {entry.path: entry.data for entry in self.sources}
            listed = [] if self.receipt is None else self.state_paths(last["before"] if ours else sha256(data))
            after, self.record_note = rewrite_record(data, files, listed), "rewritten"
        if self.receipt is not None:
            self.receipt["host"]["record"] = {"before": last["before"] if ours else sha256(data), "after": sha256(after)}
        self.entries.append(Entry("RECORD", self.site.record, sha256(data), sha256(after), after,
                                  describe(self.site.record)))

    def state_paths(self, record_before):
        """The state files as RECORD names them, so that uninstalling the package removes them too."""
        kept = sorted(needed_backups(self.receipt) | {record_before})
        names = [*STATE_FILES, *("backups/" + sha for sha in kept)]
        base = os.path.realpath(os.path.dirname(self.site.dist_info))
        return [os.path.relpath(os.path.join(os.path.realpath(os.path.dirname(os.path.dirname(self.site.state_dir))),
                                             STATE_DIRECTORY, self.site.package, name), base) for name in names]

    def check_revertible(self):
        """A receipt promises a revert: every old file must be at hand."""
        if self.receipt is None:
            return
        at_hand = {entry.before for entry in self.entries} | set(self.store) | {v["sha"] for v in self.bytecode.values()}
        for sha in needed_backups(self.receipt) - at_hand:
            self.site.backup(sha)

    # -- writing

    def back_up(self):
        folder = self.site.state("backups")
        wanted = {entry.before: entry.file for entry in self.entries if entry.before}
        wanted.update({value["sha"]: path for path, value in self.bytecode.items()})
        step("backup")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for sha, text in self.store.items():
            self.keep(folder, sha, base64.b64decode(text))
        for sha, path in wanted.items():
            self.keep(folder, sha, read(path))

    def keep(self, folder, sha, data):
        if data is None or sha256(data) != sha:
            raise Refusal("Drift", "a file changed while it was read", folder, "run the command again")
        if hash_of(os.path.join(folder, sha)) != sha:
            write_state(os.path.join(folder, sha), data)

    def write(self):
        new_meta = describe(os.path.join(self.site.package_dir, "__init__.py"))
        for folder in self.directories:
            like = os.stat(os.path.dirname(folder))
            with translated(folder):
                os.mkdir(folder)
                os.chmod(folder, stat.S_IMODE(like.st_mode))
                if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                    os.chown(folder, like.st_uid, like.st_gid)
        for entry in self.entries:
            step("write")
            if entry.after is None:
                continue
            restored = self.restored_meta(entry)
            meta = dict(entry.meta or restored or dict(new_meta, mode=new_meta["mode"] & ~0o111), mtime_ns=None)
            with translated(entry.file):
                if restored and restored["link"] and self.link_leads_to(entry, restored["link"]):
                    unlink(entry.new)
                    os.symlink(restored["link"], entry.new)
                    continue
                if restored:
                    meta["mtime_ns"] = restored["mtime_ns"]
                elif entry.meta and int(time.time()) == entry.meta["mtime_ns"] // 10 ** 9:
                    # Bytecode knows its source by whole seconds and size: never let old and new share both.
                    meta["mtime_ns"] = entry.meta["mtime_ns"] + 2 * 10 ** 9
                write_file(entry.new, entry.data, meta, entry.file if os.path.exists(entry.file) else None)

    def restored_meta(self, entry):
        """The description of the original file when this commit puts the original bytes back, else None."""
        meta = self.host.get("meta", {}).get(entry.path)
        still_ours = self.receipt is not None and self.receipt["files"].get(entry.path, {}).get("before") != entry.after
        return None if still_ours else meta

    @staticmethod
    def link_leads_to(entry, link):
        return hash_of(os.path.join(os.path.dirname(entry.file), link)) == entry.after

    def rename(self):
        for entry in self.entries:
            step("record" if entry.path == "RECORD" else "rename")
            with translated(entry.file):
                if entry.before:
                    keep_old(entry)
                if entry.after:
                    os.rename(entry.new, entry.file)
                elif entry.before:
                    os.unlink(entry.file)
        if self.receipt is None:
            remove_empty([entry.file for entry in self.sources], self.host.get("directories", []), self.prefixes)
        sync_all(self.entries)

    def refresh_bytecode(self):
        step("bytecode")
        files = [entry.file for entry in self.sources]
        with translated(self.site.package_dir):
            remove_bytecode(files, self.prefixes)
        originals = {entry.path for entry in self.sources if self.restored_meta(entry)}
        with translated(self.site.package_dir):
            restore_bytecode(self.site, {path: value for path, value in self.host.get("bytecode", {}).items()
                                         if value["source"] in originals})
        step("compile")
        for entry in self.sources:
            if entry.after and entry.path not in originals and entry.file.endswith(".py") and not self.site.tree:
                with translated(entry.file):
                    compiled = py_compile.compile(entry.file, doraise=True)
                    info = os.stat(entry.file)
                    for path in (compiled, os.path.dirname(compiled)):
                        if os.stat(path).st_uid != info.st_uid:
                            os.chown(path, info.st_uid, info.st_gid)
        if self.receipt is None:
            remove_empty(files, self.host.get("directories", []), self.prefixes)

    def import_check(self):
        step("import")
        if not self.imports or self.site.tree:
            return
        code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
        done = run_child([sys.executable, "-I", "-B", "-c", code, *self.imports], b"", None, 600)
        if done["rc"] != 0:
            raise Refusal("Conflict", "the patched modules do not import: %s" % done["stderr"].strip().split("\n")[-1],
                          sys.executable, "the old files are back; see the trace", detail=done["stderr"][-4000:])

    def read_back(self):
        step("read-back")
        for entry in self.entries:
            found = hash_of(entry.file)
            if found != entry.after:
                raise Refusal("Conflict", "the file reads back as %s, not %s" % (found, entry.after), entry.file,
                              "look for another program that writes there")


@contextlib.contextmanager
def translated(path):
    try:
        yield
    except OSError as error:
        raise os_refusal(error, error.filename if isinstance(error.filename, str) else path)


def keep_old(entry):
    """Keep the old inode under another name: putting it back needs no space and loses nothing."""
    unlink(entry.old)
    try:
        os.link(entry.file, entry.old, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV):
            raise
        if entry.meta["link"]:
            os.symlink(entry.meta["link"], entry.old)
        else:
            write_file(entry.old, read(entry.file), entry.meta, entry.file)


def sync_all(entries):
    for folder in sorted({os.path.dirname(entry.file) for entry in entries}):
        if os.path.isdir(folder):
            sync_directory(folder)


def remove_empty(files, directories, prefixes):
    """Remove DIRECTORIES (those that a commit made) as far as nothing is left in them."""
    for folder in sorted(directories, reverse=True):
        with contextlib.suppress(OSError):  # not empty: someone else's files live there now
            os.rmdir(folder)


def restore_bytecode(site, saved):
    for path, value in saved.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, site.backup(value["sha"]), value)


def load_journal(site):
    journal = site.load("journal.json")
    if journal:
        journal["entries"] = [Entry(item["path"], item["file"], item["before"], item["after"], meta=item["meta"])
                              for item in journal["entries"]]
    return journal


def undo(site, journal):
    """Put everything back as the journal found it, then drop it. Raises RollbackFailed where that cannot be done."""
    replaced = not os.path.isdir(journal["dist_info"]) or any(
        entry.path == "RECORD" and hash_of(entry.file) not in (entry.before, entry.after) for entry in journal["entries"])
    stuck = []
    for entry in reversed(journal["entries"]):
        step("undo")
        try:
            unlink(entry.new)
            found = hash_of(entry.file)
            if found == entry.before:
                unlink(entry.old)
            elif found == entry.after or found is None:
                put_back(site, entry)
            elif replaced:
                unlink(entry.old)  # a new installation took the path: its file is not ours to touch
            else:
                stuck.append((entry, "it was changed by someone else meanwhile"))
        except (OSError, Refusal) as error:
            stuck.append((entry, str(error)))
    if stuck:
        commands = ["cp -p %s %s" % (shlex.quote(site.state("backups", entry.before)), shlex.quote(entry.file))
                    if entry.before else "rm %s" % shlex.quote(entry.file) for entry, _ in stuck]
        raise Refusal("RollbackFailed", "not every file could be put back: %s" % "; ".join(
            "%s (%s)" % (entry.file, why) for entry, why in stuck), site.root,
            "run the commands, then any command of this tool", commands=commands)
    sources = [entry.file for entry in journal["entries"] if entry.path != "RECORD"]
    remove_bytecode(sources, journal["prefixes"])
    if not replaced:
        restore_bytecode(site, journal["bytecode"])
    remove_empty(sources, journal["directories"], journal["prefixes"])
    sync_all(journal["entries"])
    unlink(site.state("journal.json"))
    unlink(site.state("journal.json" + NEW))
    collect_backups(site)


def put_back(site, entry):
    if entry.before is None:
        unlink(entry.file)
    elif hash_of(entry.old) == entry.before:
        os.rename(entry.old, entry.file)
    else:
        os.makedirs(os.path.dirname(entry.file), exist_ok=True)
        write_file(entry.new, site.backup(entry.before), entry.meta)
        os.rename(entry.new, entry.file)
        unlink(entry.old)


def finish(site, journal):
    """Do what remains after the decision. Each part may have been done before."""
    step("receipt")
    receipt, gone = journal["receipt"], journal["receipt"] is None
    if gone:
        unlink(site.state("receipt.json"))
    else:
        write_state(site.state("receipt.json"), json.dumps(receipt, indent=1, sort_keys=True).encode())
        if not os.path.exists(site.state("state.json")):
            write_state(site.state("state.json"), b"{}")
    step("history")
    if gone and journal["tree"]:
        for name in STATE_FILES:  # a reverted tree is as it came: it has no prefix to keep a history in
            unlink(site.state(name))
    else:
        add_history(site, journal["history"])
    step("clean")
    for entry in journal["entries"]:
        entry = Entry(**entry) if isinstance(entry, dict) else entry
        unlink(entry.old)
    collect_backups(site)
    step("drop")
    unlink(site.state("journal.json"))
    sync_directory(site.state_dir)


def needed_backups(receipt):
    if receipt is None:
        return set()
    host = receipt.get("host") or {}
    kept = {state["before"] for state in receipt["files"].values() if state["before"]}
    kept |= {value["sha"] for value in host.get("bytecode", {}).values()}
    return kept | ({host["record"]["before"]} if host.get("record") else set())


def collect_backups(site):
    """Remove backups that no receipt needs, and half-written state files."""
    needed = needed_backups(site.load("receipt.json"))
    folder = site.state("backups")
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if name not in needed:
            unlink(os.path.join(folder, name))
    for name in os.listdir(site.state_dir):
        if name.endswith(NEW):
            unlink(site.state(name))


def add_history(site, line):
    data = read(site.state("history.jsonl")) or b""
    if any(json.loads(old).get("id") == line["id"] for old in data.splitlines()):
        return
    write_state(site.state("history.jsonl"), data + json.dumps(line, sort_keys=True).encode() + b"\n")


def ignore_hangups():
    """A dropped connection must not end a commit half way."""
    for name in (signal.SIGHUP, signal.SIGPIPE, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)


def recover(site, who):
    """Undo or finish what a dead run left, unless another run is at work. Returns what was done."""
    leftovers = any(os.path.exists(site.state(name)) for name in ("journal.json", "lock"))
    if not leftovers or lock_holder(site):
        return {"recovered": "nothing", "files": []}
    ignore_hangups()
    with locked(site, who):
        journal = load_journal(site)
        if journal is None:
            collect_backups(site)
            return {"recovered": "nothing", "files": []}
        files = [entry.path for entry in journal["entries"]]
        if journal["phase"] == "committed":
            finish(site, journal)
            return {"recovered": "finished", "files": files}
        undo(site, journal)
        return {"recovered": "undone", "files": files}


# ---------------------------------------------------------------- looking

def receipt_state(site, receipt):
    """none, valid, or stale: the package was replaced under the patch, so the receipt speaks of files that are gone."""
    if receipt is None:
        return "none"
    host = receipt["host"]
    if (host["version"], host["dist_info"]) != (site.version, site.dist_info):
        return "stale"
    files = receipt["files"]
    if site.record and host["record"] and hash_of(site.record) != host["record"]["after"]:
        lines = record_lines(read(site.record))
        if any(lines.get(path, (None, None))[1] != state["after"] for path, state in files.items()):
            return "stale"
    now = {path: hash_of(site.locate(path)) for path in files}
    changed = [path for path, state in files.items() if state["before"] != state["after"]]
    if changed and all(now[path] == files[path]["before"] for path in changed):
        return "stale"
    return "valid"


def inspect(site, request):
    lines = record_lines(read(site.record)) if site.record else {}
    files = {}
    problem = None
    for path in request.get("paths") or []:
        file = site.locate(path)
        data = read(file)
        info = os.stat(file) if data is not None else None
        files[path] = {
            "sha256": None if data is None else sha256(data),
            "record_sha256": lines.get(path, (None, None))[1],
            "size": info and info.st_size, "mode": info and stat.S_IMODE(info.st_mode), "uid": info and info.st_uid,
            "data": None if data is None else base64.b64encode(data).decode(),
        }
        problem = problem or write_problem(file)
    problem = problem or write_problem(site.state("receipt.json"))
    receipt = site.load("receipt.json")
    if problem:
        problem = {"path": problem["path"], "mount": problem["mount"], "reason": os.strerror(problem["errno"])}
    return {
        "root": site.root, "version": site.version, "editable": site.editable, "dist_info": site.dist_info,
        "record": site.record, "state_dir": site.state_dir, "files": files, "writable": problem,
        "interpreter": None if site.tree else {"executable": sys.executable, "version": sys.version.split()[0],
                                               "prefix": sys.prefix},
        "receipt": receipt, "receipt_state": receipt_state(site, receipt), "lock": lock_holder(site),
        "journal": os.path.exists(site.state("journal.json")),
    }


def forget(site, request):
    """Drop a receipt whose package is gone. No file of the package is touched."""
    with locked(site, request.get("who", "")):
        receipt = site.load("receipt.json")
        state = receipt_state(site, receipt)
        if state == "valid":
            raise Refusal("Conflict", "the receipt is in force: its files are installed", site.state("receipt.json"),
                          "use revert")
        if receipt is not None:
            unlink(site.state("receipt.json"))
            add_history(site, dict(request.get("history") or {}, event="forget", id=uuid.uuid4().hex, time=time.time(),
                                   who=request.get("who", "")))
            collect_backups(site)
    return {"forgotten": receipt is not None, "receipt_state": state}


def history(site, request):
    return {"lines": [json.loads(line) for line in (read(site.state("history.jsonl")) or b"").splitlines()]}


def state(site, request):
    """Small JSON values that outlive the connection. A value of null removes its name."""
    put = request.get("put") or {}
    for name in (*put, *(request.get("get") or ())):
        if not re.fullmatch(r"[a-z_]+", name):
            raise Refusal("UsageProblem", "a name of the state has letters a-z and _ only", name)
    values = site.load("state.json") or {}
    if put:
        with locked(site, request.get("who", "")):
            values = site.load("state.json") or {}
            values.update(put)
            values = {name: value for name, value in values.items() if value is not None}
            write_state(site.state("state.json"), json.dumps(values).encode())
    return {"values": {name: values.get(name) for name in request.get("get") or ()}}


# ---------------------------------------------------------------- programs

def run_child(argv, data, env, seconds):
    """Run a program to its end; it and its children end with the time."""
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env=dict(os.environ, **(env or {})), start_new_session=True)
    try:
        out, err = child.communicate(data, timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        err += b"\nended after %d s" % seconds
        return {"rc": 124, "stdout": out.decode("utf-8", "replace"), "stderr": err.decode("utf-8", "replace")}
    return {"rc": child.returncode, "stdout": out.decode("utf-8", "replace"), "stderr": err.decode("utf-8", "replace")}


def run_python(site, request):
    if site.tree:
        raise Refusal("NoInstallation", "a tree has no interpreter to run this with", site.root, "give --venv")
    loader = "import sys;exec(compile(sys.stdin.buffer.read(),'<sent>','exec'))"
    return run_child([sys.executable, "-I", "-B", "-c", loader, *(request.get("argv") or ())],
                     request["source"].encode(), request.get("env"), request.get("timeout") or 600)


def launchers():
    """SGLang servers on this machine, as their launcher processes (not the children that these start)."""
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
                process = look_at_process(int(entry), boot)
                if process:
                    found[process["pid"]] = process
    return [process for process in found.values() if process.pop("parent") not in found]


def look_at_process(pid, boot):
    argv = [os.fsdecode(part) for part in read("/proc/%d/cmdline" % pid).split(b"\0")[:-1]]
    if not is_launcher(argv):
        return None
    fields = read("/proc/%d/stat" % pid).rsplit(b")", 1)[1].split()
    info = os.stat("/proc/%d" % pid)
    exe, cwd = link_of(pid, "exe"), link_of(pid, "cwd")
    env = environment_of(pid)
    python = interpreter_of(argv[0], cwd, exe, env)
    prefix = os.path.dirname(os.path.dirname(python)) if python else None
    log = link_of(pid, "fd/1")
    return {
        "pid": pid, "parent": int(fields[1]), "pgid": int(fields[2]), "sid": int(fields[3]),
        "start_time": boot + int(fields[19]) / os.sysconf("SC_CLK_TCK"), "argv": argv, "exe": exe, "cwd": cwd,
        "python": python, "prefix": prefix if prefix and os.path.isfile(prefix + "/pyvenv.cfg") else None,
        "listening": listening(pid), "user": user_name(info.st_uid), "sglang_root": source_root(argv, cwd, env),
        "log": log if log and os.path.isfile(log) else None, "pycache_prefix": env.get("PYTHONPYCACHEPREFIX"),
    }


def is_launcher(argv):
    """A Python that runs sglang.launch_server or `sglang serve`; a shell or sudo around it is none."""
    if len(argv) < 2 or not os.path.basename(argv[0]).startswith("python"):
        return False
    rest = argv[1:]
    for here, word in enumerate(rest):
        following = rest[here + 1] if here + 1 < len(rest) else ""
        if word == "-m":
            return following == "sglang.launch_server" or (following == "sglang" and "serve" in rest[here + 2:here + 3])
        if word == "-c":
            return False
        if not word.startswith("-"):
            return (word.endswith("sglang/launch_server.py")
                    or (os.path.basename(word) == "sglang" and following == "serve"))
    return False


def link_of(pid, name):
    try:
        return os.readlink("/proc/%d/%s" % (pid, name))
    except OSError:
        return None  # another user's process, or the link is gone


def environment_of(pid):
    try:
        parts = (read("/proc/%d/environ" % pid) or b"").split(b"\0")
    except PermissionError:
        return {}
    return dict(os.fsdecode(part).split("=", 1) for part in parts if b"=" in part)


def interpreter_of(word, cwd, exe, env):
    """The interpreter as the process was started: through its venv, which EXE does not show."""
    if "/" in word:
        path = os.path.join(cwd or "/", word)
        return path if os.path.exists(path) else exe
    for folder in env.get("PATH", "").split(":"):
        path = os.path.join(folder, word)
        if folder and os.path.exists(path) and os.path.realpath(path) == exe:
            return path
    return exe


def source_root(argv, cwd, env):
    """The sglang directory that a working directory or PYTHONPATH puts before the installed one, else None."""
    places = env.get("PYTHONPATH", "").split(":")
    if "-m" in argv and cwd:
        places.insert(0, cwd)
    for place in places:
        package = os.path.join(place, "sglang")
        if place and os.path.isfile(os.path.join(package, "__init__.py")):
            return os.path.realpath(package)
    return None


def listening(pid):
    """TCP ports on which the process itself listens."""
    mine = set()
    try:
        for name in os.listdir("/proc/%d/fd" % pid):
            mine.add(link_of(pid, "fd/" + name))
    except PermissionError:
        return []
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in (read("/proc/%d/net/%s" % (pid, table)) or b"").split(b"\n")[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == b"0A" and "socket:[%s]" % fields[9].decode() in mine:
                ports.add(int(fields[1].rsplit(b":", 1)[1], 16))
    return sorted(ports)


# ---------------------------------------------------------------- request and reply

OPERATIONS = {"inspect": inspect, "commit": commit, "forget": forget, "history": history, "state": state,
              "run_python": run_python}


def answer(request):
    if sys.version_info < (3, 9):
        raise Refusal("NoInstallation", "the agent needs CPython 3.9 or later, this is %s" % sys.version.split()[0],
                      sys.executable, "give another interpreter: --venv")
    if request["op"] == "processes":
        return {"processes": launchers()}
    site = Site(request.get("package") or "sglang", request.get("site_packages"))
    before = recover(site, request.get("who", ""))
    if request["op"] == "recover":
        return before
    return dict(OPERATIONS[request["op"]](site, request), recovered=before["recovered"])


def main():
    os.umask(0o022)
    request = json.loads(sys.stdin.buffer.read())
    try:
        reply = answer(request)
    except Refusal as refusal:
        reply = {"error": refusal.reply}
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else "/"
        reply = {"error": dict(os_refusal(error, place).reply, detail=traceback.format_exc())}
    except Exception as error:
        reply = {"error": {"kind": "Unexpected", "what": "the agent failed: %r" % error, "where": request.get("op", ""),
                           "next": "report this, with the trace", "detail": traceback.format_exc()}}
    data = json.dumps(reply).encode()
    frame = b"\n<<ddtree-agent %s %d>>\n" % (request["nonce"].encode(), len(data))
    try:
        sys.stdout.buffer.write(frame + data + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)  # nobody listens any more; the work is done all the same


main()
