"""The network of ranks: one that nobody else on the machine can reach, if the kernel allows it.

TCPStore and gloo listen on loopback without authentication.  So any process on the same network, even another user's,
can join a world, and objects travel between ranks as pickles.  A network namespace has a loopback of its own:
processes outside can neither connect nor listen there.  The server enters a namespace before it imports torch, and all
ranks that are forked from it are in that namespace.

A process with CAP_SYS_ADMIN just makes a network namespace.  Any other process makes a user namespace as well, which
gives it the right to do so.  In the user namespace, its user and group are the same as outside, and it gives up every
capability once loopback is up.  So ranks may do what they may do elsewhere, except that other users' files seem to
belong to nobody and set-user-id programs don't work.  A child tries first whether the kernel allows all of this,
because half of it can't be undone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.worlds.processes import libc

AUTO, PRIVATE, HOST = "auto", "private", "host"
NETWORKS = (AUTO, PRIVATE, HOST)

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_PR_SET_DUMPABLE = 4
_CAP_SYS_ADMIN = 21
_CAPABILITY_VERSION_3 = 0x20080522
_INTERFACES = re.compile(r"\w+_SOCKET_IFNAME|\w+_NET_DEVICES|\w+_IB_HCA")
"""Environment variables that choose among the host's network interfaces or devices."""


@dataclass(frozen=True)
class Refusal:
    """The reason why there is no private network here, and what would change that; false if there is one."""

    why: str = ""
    remedy: str = ""

    def __bool__(self) -> bool:
        return bool(self.why)


def needs_host(asked: str, device: str, variables: Mapping[str, str]) -> str:
    """Return why ranks must be on the host's network, as far as the arguments tell; empty if they need not be.

    ``asked``: one of :data:`NETWORKS`; ``device``: the type of the ranks' device; ``variables``: their environment.
    """
    if asked == HOST:
        return "asked for"
    if asked == PRIVATE:
        return ""
    for name in sorted(variables):
        if _INTERFACES.fullmatch(name) and variables[name] not in ("", "lo", "=lo"):
            return f"{name} is set"
    return "" if device == "cpu" else "a library of an accelerator may need its interfaces"


def enter() -> None:
    """Move this process, which must have one thread, into a network of its own with only loopback, which is up.

    Errors: OSError, whose ``filename`` is the step that failed.  The process may be unusable then, so try
    :func:`refusal` first.
    """
    as_admin = is_admin()
    user, group = os.geteuid(), os.getegid()
    _checked("unshare", libc.unshare(_CLONE_NEWNET if as_admin else _CLONE_NEWNET | _CLONE_NEWUSER))
    if not as_admin:
        _write("setgroups", "deny")
        _write("uid_map", f"{user} {user} 1")
        _write("gid_map", f"{group} {group} 1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    except OSError as e:
        raise OSError(e.errno, e.strerror, "lo") from e
    if not as_admin:
        header, none = struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
        _checked("capset", libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(none)))
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # so that the controller may still inspect it


def refusal() -> Refusal:
    """Try in a child of this process whether :func:`enter` works here; returns why not, or false if it does."""
    if os.geteuid() == 0 and not is_admin():
        return Refusal(
            "root without CAP_SYS_ADMIN, as in most containers: a user namespace would take root's rights from ranks",
            "run as another user, or give the container the capability (--cap-add SYS_ADMIN); a container that "
            "nobody else has processes in keeps others out by itself",
        )
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        problem = b'["child", 0]'
        try:
            enter()
            problem = b""
        except OSError as e:
            problem = json.dumps([e.filename, e.errno]).encode()
        finally:
            os.write(write_end, problem)
            os._exit(1 if problem else 0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not answer and status == 0:
        return Refusal()
    step, number = json.loads(answer or b'["child", 0]')
    return explained(step, number)


def _setting(name: str) -> str:
    """Return a setting of the kernel; empty if it has none of that name."""
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return ""


def explained(step: str, number: int, setting: Callable[[str], str] = _setting, status: str | None = None) -> Refusal:
    """Explain why a step of :func:`enter` failed.

    ``number``: its errno; ``setting``: returns a setting of the kernel, by path below /proc/sys; ``status``: the text
    of the process's ``status`` file in /proc, which is read by default.
    """
    error = f"{step}: {os.strerror(number)}" if number else f"{step} failed"
    for name, value, why in (
        ("user/max_user_namespaces", "15000", "the kernel allows no user namespaces"),
        ("user/max_net_namespaces", "15000", "the kernel allows no network namespaces"),
        ("kernel/unprivileged_userns_clone", "1", "the kernel allows user namespaces to root only"),
    ):
        if setting(name) == "0":
            return Refusal(f"{why} ({error})", f"sysctl -w {name.replace('/', '.')}={value}")
    if setting("kernel/apparmor_restrict_unprivileged_userns") == "1" and number in (errno.EPERM, errno.EACCES):
        return Refusal(
            f"AppArmor takes the capabilities of new user namespaces ({error})",
            "an AppArmor profile with `userns,` for this Python, or "
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        )
    if number in (errno.ENOSPC, errno.EUSERS):
        return Refusal(
            f"no more namespaces for this user ({error})", "raise user.max_user_namespaces and user.max_net_namespaces"
        )
    if number in (errno.EINVAL, errno.ENOSYS):
        return Refusal(f"the kernel has no such namespaces ({error})", "a kernel with CONFIG_USER_NS and CONFIG_NET_NS")
    if status is None:
        status = Path("/proc/self/status").read_text()
    if re.search(r"^Seccomp:\s*2", status, re.MULTILINE):
        return Refusal(
            f"a seccomp filter, as of a container, refuses namespaces ({error})",
            "a filter that allows unshare (docker run --security-opt seccomp=...); a container that nobody else has "
            "processes in keeps others out by itself",
        )
    return Refusal(f"the kernel refuses ({error})", "ask whoever configured it; namespaces(7) says what may forbid it")


def is_admin() -> bool:
    """Return whether this process has CAP_SYS_ADMIN, and so needs no user namespace."""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return capabilities is not None and bool(int(capabilities[1], 16) >> _CAP_SYS_ADMIN & 1)


def _checked(step: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), step)


def _write(name: str, text: str) -> None:
    try:
        Path("/proc/self", name).write_text(text)
    except OSError as e:
        raise OSError(e.errno, e.strerror, name) from e
