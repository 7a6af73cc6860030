# SPDX-License-Identifier: Apache-2.0
"""Starts Python scripts as processes that have imported torch, transformers and this library already.

The imports take six seconds of a processor. One server does them once, and each process is a fork of it that runs its script as the main
program, with an environment, arguments and pipes of its own.
"""

import contextlib
import gc
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import threading

_server: socket.socket | None = None


def _start_server() -> socket.socket:
    from test_data_parallel import environment

    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    subprocess.Popen(
        [sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()], env=environment(), start_new_session=True
    )
    its.close()
    return ours


class Process:
    """What the tests use of subprocess.Popen with text pipes."""

    def __init__(self, script, *words, env: dict[str, str]) -> None:
        global _server
        _server = _server or _start_server()
        pipes = [os.pipe() for _ in range(3)]
        message = json.dumps({"argv": [str(script), *map(str, words)], "env": env}).encode()
        socket.send_fds(_server, [message], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        self.stdout, self.stderr, self._status = (os.fdopen(read, encoding="utf-8") for read, _ in pipes)
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._status.readline())
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        found = {}
        readers = [
            threading.Thread(target=lambda name=name: found.update({name: getattr(self, name).read()}), daemon=True)
            for name in ("stdout", "stderr")
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        self.wait()
        return found["stdout"], found["stderr"]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def ranks_of(count: int, script, *words, env: dict[str, str], port: int) -> list[Process]:
    """Processes with the variables that a launcher sets."""
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [Process(script, *words, env={**env, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)]


def _serve(requests: socket.socket) -> dict | None:
    """Returns in a forked process what it runs, and None in the server at its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for those that wait
    while True:
        message, fds, *_ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            return None
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            out, err, status = fds
            if (pid := os.fork()) == 0:
                os.close(status)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out, 1)
                os.dup2(err, 2)
                os.close(out)
                os.close(err)
                return json.loads(message)
            os.close(out)
            os.close(err)
            os.write(status, f"{pid}\n".encode())
            _, ended = os.waitpid(pid, 0)
            os.write(status, f"{os.waitstatus_to_exitcode(ended)}\n".encode())
            os._exit(0)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).parent)
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import qlorapp
    import tiny_trainer  # noqa: F401
    import trl  # noqa: F401

    for name in ("AutoModelForCausalLM", "SFTTrainer", "Trainer", "LoraConfig", "BitsAndBytesConfig", "DataCollatorForSeq2Seq"):
        getattr(qlorapp, name)
    gc.collect()
    gc.freeze()  # collections in the processes leave out what is imported
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = request["argv"]
        sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
