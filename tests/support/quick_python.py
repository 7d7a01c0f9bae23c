"""A program that stands for `python` and starts in milliseconds: for processes that start others by sys.executable.

`program()` is the path of a small script. The script hands its arguments, its environment, its folder and its standard
streams to a server, and the server forks a process that has imported torch and gossamer already (forks.py). The script
stays: it passes signals on, ends as the fork ends, and the fork is killed if the script is. So a launcher sees the
process that it has started, and a worker that trains starts in 0.1 s of a core instead of 3.

The fork has the script's network and cores, another process id, and a session of its own. It does not take all modules
apart at its end, which would cost a second of a core. All forks have the same hash seed. The script becomes the
real interpreter if it gets an option other than -u, and in a container with process ids of its own.

The script imports this module alone, so that it starts quickly; the rest is imported where a server needs it.
"""

import contextlib
import json
import os
import signal
import socket
import sys
from functools import cache

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ENTERED = {"net": 0x40000000, "mnt": 0x00020000}  # kinds of namespaces, and their flags of setns
SCHEDULING = {"x86_64": (315, 314), "aarch64": (275, 274)}  # system calls sched_getattr and sched_setattr
MOST_BYTES = 1 << 17  # of a request

# ---- the script


@cache
def program() -> str:
    """The path of the script. Its server starts at the first call and ends with this process."""
    import atexit
    import shlex
    import shutil
    import tempfile

    from tests.support.forks import FORKED

    folder = tempfile.mkdtemp(prefix="python")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = os.path.join(folder, "server")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        FORKED.Process(target=serve, args=(listener,), daemon=True).start()
    path = os.path.join(folder, "python")
    with open(path, "w") as file:
        file.write(
            # A shell runs the first lines, because a line with "#!" can name no path with a space.
            f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} -IS \"$0\" \"$@\"\n' '''\n"
            f"import sys\nsys.path[0] = {os.path.dirname(__file__)!r}\n"
            f"from quick_python import main\nmain({address!r}, {sys.executable!r}, {own_processes()!r})\n"
        )
    os.chmod(path, 0o755)
    return path


def own_processes() -> str:
    """The namespace of process ids."""
    return os.readlink("/proc/self/ns/pid")


def main(address: str, real: str, processes: str) -> None:
    """What the script does."""
    argv = sys.argv[1:]
    while argv and argv[0] == "-u":
        argv.pop(0)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-c", "-m")) or own_processes() != processes:
        os.execv(real, [real, *sys.argv[1:]])
    request = {
        "argv": argv,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "unbuffered": "-u" in sys.argv[1 : len(sys.argv) - len(argv)],
        "python": sys.argv[0],
        "process": os.getpid(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        code = int(server.recv(16) or 1)
    if code < 0:
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# ---- the server


def serve(listener: socket.socket) -> None:
    """Forks for all that ask, passes their signals on, and tells them how their forks have ended."""
    import select

    from tests.support.forks import become

    become({}, "/")
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    forks: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([listener, ended, *forks], [], [])
        if listener in ready:
            connection, _ = listener.accept()
            forks[connection] = begin(connection, [listener, *forks], [ended, wake])
        if ended in ready:
            os.read(ended, 1024)
            for connection, pid in list(forks.items()):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    tell(connection, os.waitstatus_to_exitcode(status))
                    del forks[connection]
        for connection in forks.keys() & set(ready):
            number = asked(connection)
            os.kill(forks[connection], number)
            if number == signal.SIGKILL:
                os.waitpid(forks.pop(connection), 0)
                connection.close()


def asked(connection: socket.socket) -> int:
    """The signal that the script passes on, or SIGKILL if the script is gone."""
    try:
        return (connection.recv(1) or bytes([signal.SIGKILL]))[0]
    except OSError:
        return signal.SIGKILL


def tell(connection: socket.socket, code: int) -> None:
    with contextlib.suppress(OSError):  # the script is gone
        connection.send(str(code).encode())
    connection.close()


def begin(connection: socket.socket, sockets: list[socket.socket], pipe: list[int]) -> int:
    """Forks a process that runs what the connection asks for. Returns its id."""
    text, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (connection, *sockets):
            each.close()
        for each in pipe:
            os.close(each)
        try:
            run(json.loads(text), streams)
        finally:
            os._exit(1)
    for stream in streams:
        os.close(stream)
    return pid


def run(request: dict, streams: list[int]) -> None:
    """What a fork does, which does not return."""
    import io
    import multiprocessing

    from tests.support.forks import become, run_script

    os.setsid()
    multiprocessing.current_process().daemon = False  # as the server is, which may have no children
    take_place_of(request["process"])
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    environment = request["environment"]
    become(environment, request["folder"])
    unbuffered = request["unbuffered"] or bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    out = open(1, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(out, write_through=unbuffered)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.executable = request["python"]
    end(run_script(request["argv"]))


def end(code: int) -> None:
    """Ends this process after its threads and after what it has registered for its end.

    An interpreter would also take all modules apart, which costs a second of a core.
    """
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()  # the script's own objects end, as they would
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def take_place_of(process: int) -> None:
    """Moves this process into the network of another one, and onto its cores, in turns as short as its turns."""
    import ctypes
    import platform

    from tests.support.forks import LIBC, enter

    for kind, flag in ENTERED.items():
        theirs = f"/proc/{process}/ns/{kind}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{kind}"):
            enter(theirs, flag)
    os.sched_setaffinity(0, os.sched_getaffinity(process))
    get, put = SCHEDULING.get(platform.machine(), (-1, -1))
    attributes = ctypes.create_string_buffer(56)
    if LIBC.syscall(get, process, attributes, 56, 0) == 0:
        LIBC.syscall(put, 0, attributes, 0)
