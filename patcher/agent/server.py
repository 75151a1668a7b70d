"""What is done on the host to a server's processes: look, remember, end, start, read the log.

Stand-alone (CPython >= 3.9, stdlib, Linux): its text is sent to the host and run there with one JSON request as the
only argument; it prints one JSON object. It runs there because a server's environment may hold secrets: it is copied
from /proc to a file that only its owner can read, and never travels.

A process is named by its id and its start tick together, since ids are used again.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

LISTEN = "0A"  # the state of a listening socket in /proc/net/tcp
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
POLL_S = 0.2
ORPHAN_GRACE_S = 10.0  # what a launcher leaves behind when it has ended may end by itself within this
GPU_SETTLE_S = 60.0
GPU_NOISE_MIB = 64


# ---- processes ---------------------------------------------------------------------------------------------


def read_stat(pid):
    """(state, ppid, pgid, sid, start tick) of a process, or None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as handle:
            # The name is in brackets and may itself hold spaces and brackets.
            fields = handle.read().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19])


def is_alive(pid, ticks):
    """Whether this very process runs; a zombie does not."""
    stat = read_stat(pid)
    return stat is not None and stat[4] == ticks and stat[0] not in "ZX"


def all_processes():
    """pid -> stat of every process that is not a zombie."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = read_stat(int(name))
            if stat is not None and stat[0] not in "ZX":
                found[int(name)] = stat
    return found


def start_time(ticks):
    """Unix time of a start tick. By the boot clock, since `btime` in /proc/stat is rounded to a second."""
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / TICKS_PER_SECOND)


def tree_of(root, processes):
    """The process, its descendants, and, where it leads its session, everything else in that session.

    A scheduler outlives a killed launcher as a child of init; in a session of its own it is still the launcher's.
    """
    children = {}
    for pid, stat in processes.items():
        children.setdefault(stat[1], []).append(pid)
    tree, todo = set(), [root]
    while todo:
        pid = todo.pop()
        if pid not in tree:
            tree.add(pid)
            todo.extend(children.get(pid, ()))
    leads = processes.get(root, (None, None, None, None))[3] == root
    return tree | {pid for pid, stat in processes.items() if leads and stat[3] == root}


def command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as handle:
            data = handle.read()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [os.fsdecode(word) for word in data.split(b"\0")[:-1]]


# ---- sockets -----------------------------------------------------------------------------------------------


def listening_inodes(port, pid="self"):
    """Inodes of the sockets that listen on the port, in the network namespace of a process."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{pid}/net/{table}") as handle:
                rows = handle.readlines()[1:]
        except FileNotFoundError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(fields[9])
    return inodes


def holds_socket(pid, inodes):
    """True or False; None when the process may not be looked into."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return None
    except (FileNotFoundError, ProcessLookupError):
        return False
    for name in names:
        try:
            link = os.readlink(f"/proc/{pid}/fd/{name}")
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:  # some sandboxes list the names of another's files and still hide where they lead
            return None
        if link.startswith("socket:[") and link[8:-1] in inodes:
            return True
    return False


def describe(pid, processes):
    """A process as the operator's side knows it."""
    stat = processes[pid]
    log = None
    try:
        cwd = os.readlink(f"/proc/{pid}/cwd")
        log = os.readlink(f"/proc/{pid}/fd/1")
    except (PermissionError, FileNotFoundError):
        cwd = None
    return {
        "pid": pid,
        "ticks": stat[4],
        "start_time": start_time(stat[4]),
        "argv": command_line(pid),
        "cwd": cwd,
        "log": log if log and os.path.isfile(log) else None,
    }


def listener(port, tree, namespace, processes):
    """Who holds the port: {"owner": server | other | unseen | none, "process": the other one or None}."""
    inodes = listening_inodes(port, namespace)
    if not inodes:
        return {"owner": "none", "process": None}
    hidden = False
    for pid in sorted(processes, key=lambda pid: pid not in tree):
        held = holds_socket(pid, inodes)
        hidden = hidden or held is None
        if held:
            owner = "server" if pid in tree else "other"
            return {"owner": owner, "process": None if pid in tree else describe(pid, processes)}
    return {"owner": "unseen" if hidden else "none", "process": None}


def status(request):
    """The process `pid` (with `ticks`, where known) and who holds the port. Pid 0 is nobody."""
    processes = all_processes()
    root = request["pid"]
    if root not in processes or request.get("ticks") not in (None, processes[root][4]):
        root = None
    tree = tree_of(root, processes) if root is not None else set()
    server = dict(describe(root, processes), tree=sorted(tree)) if root is not None else None
    namespace = root if root is not None else "self"
    return {"now": time.time(), "server": server, "listener": listener(request["port"], tree, namespace, processes)}


# ---- end and start -----------------------------------------------------------------------------------------


def remember(request):
    """Copy the server's environment to `env_file` (mode 0600); gives its command line, directory and owner."""
    pid, ticks = request["pid"], request["ticks"]
    with open(f"/proc/{pid}/environ", "rb") as handle:
        environment = handle.read()
    owner = os.stat(f"/proc/{pid}")
    argv, cwd = command_line(pid), os.readlink(f"/proc/{pid}/cwd")
    if not is_alive(pid, ticks):
        return {"error": f"process {pid} ended while its command line was read"}
    temporary = request["env_file"] + ".new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    with open(new_file(temporary), "wb") as handle:
        handle.write(environment)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, request["env_file"])
    return {"argv": argv, "cwd": cwd, "uid": owner.st_uid, "gid": owner.st_gid, "umask": umask_of(pid)}


def new_file(path):
    """A descriptor of a new file that only its owner can read, in a directory that is made private where it is new."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND, 0o600)


def umask_of(pid):
    """The mode bits that a process takes off new files."""
    with open(f"/proc/{pid}/status") as handle:
        found = re.search(r"^Umask:\s*([0-7]+)$", handle.read(), re.MULTILINE)
    return int(found[1], 8) if found else 0o022  # Linux before 4.7 does not tell


def stop(request):
    """End the server's processes: TERM to the launcher, KILL to what is left, then wait for port and GPU memory.

    Only processes of this server's tree are ever signalled, each checked by its start tick.
    """
    port, launcher, known = request["port"], request["pid"], {}

    def alive():
        """Every process of the tree that still runs, those included that were born while it was going down."""
        processes = all_processes()
        for root in [request["pid"], *known]:
            same = root in processes and processes[root][4] == known.get(root, request["ticks"])
            for pid in tree_of(root, processes) if same else ():
                known.setdefault(pid, processes[pid][4])
        for pid in left_behind(launcher, request["ticks"], processes):
            known.setdefault(pid, processes[pid][4])
        return [pid for pid, ticks in known.items() if pid in processes and processes[pid][4] == ticks]

    def wait_gone(seconds, gone):
        deadline = time.monotonic() + seconds
        while not gone(alive()) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    if launcher in alive():
        send(launcher, request["ticks"], signal.SIGTERM)
    wait_gone(request["grace"], lambda left: launcher not in left)
    wait_gone(min(request["grace"], ORPHAN_GRACE_S), lambda left: not left)
    left = alive()
    killed = list(left)
    for pid in left:
        send(pid, known[pid], signal.SIGKILL)
    wait_gone(request["grace"], lambda left: not left)
    left = alive()
    if left:
        return {"error": f"processes {left} do not end, not even by KILL"}
    problem = wait_port_free(port, request["grace"])
    return problem or {"ended": sorted(known), "killed": sorted(killed), "gpu": wait_gpu_free()}


def port_free(request):
    """An error that names the holder when somebody listens on the port."""
    return wait_port_free(request["port"], 0) or {}


def wait_port_free(port, seconds):
    """None once nobody listens on the port, else the error."""
    deadline = time.monotonic() + seconds
    while listening_inodes(port):
        if time.monotonic() > deadline:
            holder = listener(port, set(), "self", all_processes())["process"]
            who = f"process {holder['pid']}: {' '.join(holder['argv'][:2])}" if holder else "a process not seen"
            return {"error": f"port {port} is still held, by {who}"}
        time.sleep(POLL_S)
    return None


def left_behind(leader, ticks, processes):
    """What runs on in the session of a launcher that is dead, such as schedulers that hold its port and GPU memory.

    While any of them lives, the session's id is given to no other process; one that has it nevertheless came later.
    """
    if leader in processes or leader <= 1:  # session 0 is every process from outside a container
        return []
    return [pid for pid, stat in processes.items() if stat[3] == leader and stat[4] >= ticks]


def send(pid, ticks, number):
    if is_alive(pid, ticks):
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself in between
            os.kill(pid, number)


def wait_gpu_free():
    """Wait until the used GPU memory no longer falls: the driver gives it back a while after the processes end.

    Process ids that nvidia-smi prints are of another namespace in many containers, so the amount is what is watched.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    before, deadline = gpu_used(), time.monotonic() + GPU_SETTLE_S
    while before is not None and time.monotonic() < deadline:
        time.sleep(1.0)
        used = gpu_used()
        if used is None or sum(before) - sum(used) < GPU_NOISE_MIB:
            return used
        before = used
    return before


def gpu_used():
    """MiB used on each GPU; None where nvidia-smi does not work (no driver)."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    numbers = re.findall(r"^\s*(\d+)\s*$", result.stdout.decode("ascii", "replace"), re.MULTILINE)
    return [int(number) for number in numbers] if result.returncode == 0 and numbers else None


def start(request):
    """Start a command line in a session of its own, with a remembered environment; output goes to a new log file."""
    with open(request["env_file"], "rb") as handle:
        pairs = [entry.partition(b"=") for entry in handle.read().split(b"\0") if b"=" in entry]
    environment = {name: value for name, _, value in pairs}
    argv, identity = request["argv"], {}
    owner = (request["uid"], request["gid"])
    log = new_file(request["log"])
    if os.geteuid() == 0 and owner[0] != 0:  # through sudo: the server goes on under the account that it had
        import pwd

        name = pwd.getpwuid(owner[0]).pw_name
        identity = {"user": owner[0], "group": owner[1], "extra_groups": os.getgrouplist(name, owner[1])}
        os.fchown(log, *owner)
    search = os.fsdecode(environment.get(b"PATH", os.fsencode(os.defpath)))
    program = argv[0] if os.sep in argv[0] else shutil.which(argv[0], path=search)
    if program is None:
        return {"error": f"{argv[0]} is not on the server's own PATH"}
    try:
        process = subprocess.Popen(
            argv,
            executable=program,
            cwd=request["cwd"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            umask=request["umask"],
            **identity,
        )
    except OSError as error:
        return {"error": f"{error.filename or program}: {error.strerror}"}
    finally:
        os.close(log)
    stat = read_stat(process.pid)
    return {"pid": process.pid, "ticks": stat[4], "start_time": start_time(stat[4]), "log": request["log"]}


def run(request):
    """Run a command to its end, with its output in a new file.

    What it leaves running in the background has no stream of ours, so that it neither keeps us waiting nor fails at
    its next line of output once we are gone.
    """
    log = new_file(request["log"])
    try:
        process = subprocess.Popen(
            request["argv"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        return {"rc": process.wait()}
    except OSError as error:
        return {"error": f"{error.filename or request['argv'][0]}: {error.strerror}"}
    finally:
        os.close(log)


def read_log(request):
    """The bytes of a log from `offset` on, at most `limit` (the last ones; `offset` says where they begin)."""
    try:
        with open(request["path"], "rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            begin = request["offset"] if request["offset"] <= size else 0  # shorter now: it was rotated
            begin = max(begin, size - request["limit"])
            handle.seek(begin)
            text = handle.read(request["limit"]).decode("utf-8", "replace")
    except OSError as error:
        return {"text": "", "offset": 0, "size": 0, "problem": error.strerror}
    return {"text": text, "offset": begin, "size": size, "problem": None}


OPERATIONS = {
    "status": status,
    "remember": remember,
    "stop": stop,
    "port_free": port_free,
    "start": start,
    "run": run,
    "read_log": read_log,
}


def main():
    request = json.loads(sys.argv[1])
    try:
        reply = OPERATIONS[request["op"]](request)
    except PermissionError as error:
        reply = {"error": f"not permitted: {error.filename or error.strerror}", "permission": True}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
