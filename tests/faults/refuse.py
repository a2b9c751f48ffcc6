"""A kernel that refuses chosen system calls, for real: a seccomp filter over this process.

It needs no privilege and cannot be undone, so it is installed in a child process.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_NUMBERS = {
    "x86_64": {"mbind": 237, "move_pages": 279, "mlock": 149, "io_uring_setup": 425},
    "aarch64": {"mbind": 235, "move_pages": 239, "mlock": 228, "io_uring_setup": 425},
}
SYSCALLS = _NUMBERS.get(platform.machine(), {})

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def refuse(call: str, error: int = errno.EPERM) -> None:
    """From now on `call` fails with `error` in this process and its children."""

    def instruction(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
        return struct.pack("=HBBI", code, jump_true, jump_false, value)

    program = b"".join(
        [
            instruction(_LOAD_WORD, 0, 0, 0),  # the call's number
            instruction(_JUMP_IF_EQUAL, 0, 1, SYSCALLS[call]),
            instruction(_RETURN, 0, 0, _ERRNO | error),
            instruction(_RETURN, 0, 0, _ALLOW),
        ]
    )
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(header), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")
