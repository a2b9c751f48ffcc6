"""Start Python programs as forks of a process that has imported torch, transformers and Penstock.

Importing them takes seconds of CPU time in every child process, and a fork takes milliseconds. A
program that starts here behaves as one that `subprocess.Popen` starts: it has its own standard
streams, environment and working directory, it can be killed, and it exits as Python does. Use it
where a test needs a process, but not the start of one. The server is single-threaded and computes
nothing with torch, since a fork has no copies of other threads. Where an import starts a thread, as
builds of torch for CUDA do, programs start as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

REPO = Path(__file__).parents[2]

IMPORTED = (
    *("torch", "transformers", "tokenizers", "safetensors.torch", "torch.distributed"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
    *("transformers.models.auto.modeling_auto", "transformers.trainer", "torch._dynamo"),
    *("penstock", "penstock.cli.main", "penstock.cli.train", "penstock.train.session"),
    *("penstock.engine.prepare", "penstock.engine.engine", "penstock.integrations"),
)
"""What programs of tests import. Those that import more import it themselves."""

FORKS, HAS_THREADS = b"f", b"t"
"""The first byte from the server: whether it can fork."""

CHILDREN_SECONDS = [0.0]
"""CPU time of programs that have ended, for `cpu_time.py`."""


class Child:
    """A running program, with the methods and attributes of `subprocess.Popen` that tests use."""

    def __init__(self, channel: socket.socket, streams: Sequence[IO[str]]) -> None:
        self._channel = channel
        self.stdin, self.stdout, self.stderr = streams
        self.pid = int(self._receive())
        self.returncode: int | None = None

    def _receive(self) -> str:
        data = b""
        while not data.endswith(b"\n"):
            part = self._channel.recv(4096)
            assert part, "the fork server has ended"
            data += part
        return data.decode().strip()

    def poll(self) -> int | None:
        """Return the exit code, or None if the program is running."""
        if self.returncode is None:
            self._channel.setblocking(False)
            try:
                ended = self._channel.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return None
            finally:
                self._channel.setblocking(True)
            assert ended, "the fork server has ended"
        return self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or the negative number of a signal, when the program has ended."""
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                status, seconds = self._receive().split()
            except TimeoutError:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout) from None
            self.returncode = os.waitstatus_to_exitcode(int(status))
            CHILDREN_SECONDS[0] += float(seconds)
            self._channel.close()
            self.stdin.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Close the program's input, and return its output and errors when it has ended."""
        if not self.stdin.closed:
            self.stdin.close()
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(_read(self.stderr)))
        reader.start()
        output = _read(self.stdout)
        reader.join()
        self.wait(timeout)
        return output, errors[0]


def _read(stream: IO[str]) -> str:
    if stream.closed:
        return ""
    with stream:
        return stream.read()


class _Server:
    """The process that forks, started by the first call."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            # huggingface_hub reads its variable when it is imported. No test may use the network.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], cwd=REPO, env=environment,
            )  # fmt: skip
        atexit.register(self.close)
        self.forks = self._socket.recv(1) == FORKS

    def start(self, request: Mapping[str, Any]) -> Child:
        ours, theirs = socket.socketpair()
        inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
        given = [inputs[0], outputs[1], errors[1], theirs.fileno()]
        data = json.dumps(request).encode()
        socket.send_fds(self._socket, [len(data).to_bytes(8, "little")], given)
        self._socket.sendall(data)
        for each in given[:3]:
            os.close(each)
        theirs.close()
        streams = [
            os.fdopen(each, mode, encoding="utf-8")
            for each, mode in ((inputs[1], "w"), (outputs[0], "r"), (errors[0], "r"))
        ]
        return Child(ours, streams)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_servers: dict[int, _Server] = {}


def start(
    arguments: Sequence[str], *, env: Mapping[str, str] | None = None
) -> Child | subprocess.Popen[str]:
    """Start `python ARGUMENTS`, which are `-m MODULE ...` or `-c CODE ...`."""
    if os.getpid() not in _servers:  # a fork of this process must not use its server
        _servers[os.getpid()] = _Server()
    if not _servers[os.getpid()].forks:
        return subprocess.Popen(
            [sys.executable, *arguments], env=env, encoding="utf-8",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    request = {
        "arguments": list(arguments),
        "env": dict(os.environ if env is None else env),
        "cwd": str(Path.cwd()),
    }
    return _servers[os.getpid()].start(request)


def run(
    arguments: Sequence[str], *, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; see `start`."""
    child = start(arguments, env=env)
    output, errors = child.communicate()
    assert child.returncode is not None
    return subprocess.CompletedProcess(list(arguments), child.returncode, output, errors)


# The server.


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Return the request in the fork, and None when the tests have ended."""
    events = selectors.DefaultSelector()
    events.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.fileobj is not requests:
                _reap(events, key)
                continue
            size, given, *_ = socket.recv_fds(requests, 8, 4)
            if not size:
                return None
            data = b""
            while len(data) < int.from_bytes(size, "little"):
                data += requests.recv(int.from_bytes(size, "little") - len(data))
            pid = os.fork()
            if pid == 0:
                events.close()
                requests.close()
                _use_streams(given)
                request: dict[str, Any] = json.loads(data)
                return request
            for each in given[:3]:
                os.close(each)
            os.write(given[3], f"{pid}\n".encode())
            events.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, given[3]))


def _reap(events: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    pid, channel = key.data
    _, status, usage = os.wait4(pid, 0)
    events.unregister(key.fileobj)
    os.close(key.fd)
    with contextlib.suppress(OSError):  # nobody waits for it any more
        os.write(channel, f"{status} {usage.ru_utime + usage.ru_stime}\n".encode())
    os.close(channel)


def _use_streams(given: Sequence[int]) -> None:
    for number, descriptor in enumerate(given[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.close(given[3])
    # New objects: those of the server know what its own streams can do.
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)


def _run_program(request: Mapping[str, Any]) -> None:
    """Do what `python` does with the arguments."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    kind, name, *rest = request["arguments"]
    if kind == "-m":
        sys.argv = [name, *rest]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})


def main() -> None:
    import gc
    import importlib

    # Ctrl-C in a terminal reaches the tests' whole group; the server ends when they do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all objects
    tasks = len(list(Path("/proc/self/task").iterdir()))
    requests = socket.socket(fileno=int(sys.argv[1]))
    if tasks > 1:  # a fork would have copies of their locks only
        requests.sendall(HAS_THREADS)
        return
    requests.sendall(FORKS)
    request = serve(requests)
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run_program(request)


if __name__ == "__main__":
    main()
