"""Two network namespaces on this machine, connected by a link that is slow and loses packets.

Each namespace has a TUN interface, and threads of this process carry the packets between the two.
Not every kernel has `tc netem`, which does the same. Needs root, `ip` of iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from typing import Self

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MTU = 9000
WIRE = "wire"
"""Name of the interface in both namespaces."""


class SlowLink:
    """A link between two namespaces. `cut` lets no packet pass any more."""

    def __init__(self, *, delay: float, loss: float) -> None:
        self.names = tuple(f"penstock-{os.getpid()}-{side}" for side in "ab")
        self.addresses = ("10.233.7.1", "10.233.7.2")
        self.passed = self.dropped = 0
        self._delay, self._loss, self._is_cut = delay, loss, False
        self._closed = threading.Event()
        self._fds: list[int] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        try:
            for name, address in zip(self.names, self.addresses, strict=True):
                _ip("netns", "add", name)
                self._fds.append(_open_tun(name))
                _ip("-n", name, "address", "add", f"{address}/24", "dev", WIRE)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", WIRE, "mtu", str(MTU), "up")
        except BaseException:
            self.__exit__()
            raise
        for number, (source, target) in enumerate((self._fds, self._fds[::-1])):
            carry = threading.Thread(target=self._carry, args=(source, target, number), daemon=True)
            carry.start()
            self._threads.append(carry)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()
        for fd in self._fds:
            os.close(fd)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def cut(self) -> None:
        """Drop all packets from now on. The interfaces stay up, as when a switch fails."""
        self._is_cut = True

    def inside(self, side: int, *command: str) -> list[str]:
        """Return a command that runs in one of the namespaces."""
        return ["ip", "netns", "exec", self.names[side], *command]

    def _carry(self, source: int, target: int, seed: int) -> None:
        """Carry packets in one direction, each of them `delay` seconds later."""
        chance, waiting = random.Random(seed), deque[tuple[float, bytes]]()
        while not self._closed.is_set():
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            if select.select([source], [], [], pause)[0]:
                packet = os.read(source, 65536)
                if self._is_cut or chance.random() < self._loss:
                    self.dropped += 1
                else:
                    waiting.append((time.monotonic() + self._delay, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                os.write(target, waiting.popleft()[1])
                self.passed += 1


def why_no_link() -> str:
    """Return why this machine cannot have such a link; "" if it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    for name in ("ip", "unshare"):
        if shutil.which(name) is None:
            return f"needs `{name}` (apt install iproute2 util-linux)"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    try:
        with SlowLink(delay=0, loss=0):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"cannot connect two network namespaces: {getattr(error, 'stderr', None) or error}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _open_tun(namespace: str) -> int:
    """Create the interface in a namespace, and return the file from which its packets are read."""
    found: list[int] = []

    def work() -> None:
        with open(f"/run/netns/{namespace}") as there:
            # A thread may be in another namespace than the rest of its process.
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(there.fileno(), CLONE_NEWNET) != 0:
                return
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        name = struct.pack("16sH22x", WIRE.encode(), IFF_TUN | IFF_NO_PI)
        fcntl.ioctl(fd, TUNSETIFF, name)
        found.append(fd)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not found:
        raise OSError(f"cannot create an interface in {namespace}")
    return found[0]
