# SPDX-License-Identifier: Apache-2.0
"""Runs the qlorapp command as subprocess.run does, in a fork of a process that has loaded its libraries (start_server.cpp)."""

import os
import socket
import subprocess
import threading

from conftest import BUILD

SHIM = BUILD / "tests" / "libstart_server.so"
#: Variables that libraries read while they are loaded: a server for each set of values.
_EARLY = ("OMP_", "GOMP_", "LD_", "MALLOC_", "GLIBC_", "KMP_", "MKL_")
_servers: dict[tuple, socket.socket] = {}


def _server(env: dict[str, str]) -> socket.socket:
    key = tuple(sorted((name, value) for name, value in env.items() if name.startswith(_EARLY)))
    if key not in _servers:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        given = {**env, "LD_PRELOAD": str(SHIM), "START_SERVER": str(its.fileno())}
        subprocess.Popen(
            [BUILD / "qlorapp"], env=given, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        its.close()
        _servers[key] = ours
    return _servers[key]


def run(*words, env: dict[str, str], cwd=None, timeout: float | None = None) -> subprocess.CompletedProcess:
    """The command with its output as text. Without the built server: a process of its own."""
    command = [str(BUILD / "qlorapp"), *map(str, words)]
    if not SHIM.exists() or "LD_PRELOAD" in env:
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=cwd, timeout=timeout)
    texts = [str(cwd or os.getcwd()), str(len(command)), *command, *(f"{name}={value}" for name, value in env.items())]
    pipes = [os.pipe() for _ in range(3)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    message = b"".join(os.fsencode(text) + b"\0" for text in texts)
    socket.send_fds(_server(env), [message], [nothing, *(write for _, write in pipes)])
    for fd in (nothing, *(write for _, write in pipes)):
        os.close(fd)
    out, err, status = (os.fdopen(read) for read, _ in pipes)
    found = {}
    readers = [
        threading.Thread(target=lambda n=name, f=file: found.update({n: f.read()}))
        for name, file in (("out", out), ("err", err))
    ]
    for reader in readers:
        reader.daemon = True
        reader.start()
    for reader in readers:
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(command, timeout)
    with out, err, status:
        return subprocess.CompletedProcess(command, int(status.read()), found["out"], found["err"])
