"""What a container's seccomp filter does: namespaces are refused to a process and to all that it starts."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_UNSHARE = {"x86_64": 272, "aarch64": 97}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


def refuse_unshare() -> None:
    """From now on unshare(2) fails with EPERM, here and in every child."""
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD, 0, 0, 0),  # the number of the system call
            (_JUMP_IF_EQUAL, 0, 1, _UNSHARE[platform.machine()]),
            (_RETURN, 0, 0, _ERRNO | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    instructions = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _FILTER, header)):
        if libc.prctl(*arguments, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
