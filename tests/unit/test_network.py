"""Which network ranks get, and in which words it is said why not another."""

from __future__ import annotations

import errno
import re
import subprocess
import sys

import pytest

from harness.commands.doctor import isolation
from harness.worlds.network import AUTO, HOST, PRIVATE, Refusal, explained, needs_host


class TestNeedsHost:
    @pytest.mark.parametrize(
        ("asked", "device", "variables", "expected"),
        [
            (AUTO, "cpu", {}, ""),
            (AUTO, "cpu", {"GLOO_SOCKET_IFNAME": "lo", "UCX_NET_DEVICES": ""}, ""),
            (AUTO, "cpu", {"GLOO_SOCKET_IFNAME": "eth0"}, "GLOO_SOCKET_IFNAME is set"),
            (AUTO, "cpu", {"MINE_SOCKET_IFNAME": "ib0"}, "MINE_SOCKET_IFNAME is set"),
            (AUTO, "cpu", {"UCX_NET_DEVICES": "mlx5_0:1"}, "UCX_NET_DEVICES is set"),
            (AUTO, "an_accelerator", {}, "a library of an accelerator may need its interfaces"),
            (PRIVATE, "an_accelerator", {"GLOO_SOCKET_IFNAME": "eth0"}, ""),
            (HOST, "cpu", {}, "asked for"),
        ],
    )
    def test_reason(self, asked: str, device: str, variables: dict[str, str], expected: str) -> None:
        """Ranks are on the host's network where that was asked for, or where something shows that they need it."""
        assert needs_host(asked, device, variables) == expected


class TestExplained:
    @pytest.mark.parametrize(
        ("step", "number", "settings", "status", "why", "remedy"),
        [
            ("unshare", errno.ENOSPC, {"user/max_user_namespaces": "0"}, "", "no user names", "max_user_namespaces="),
            ("unshare", errno.ENOSPC, {"user/max_net_namespaces": "0"}, "", "no network names", "max_net_namespaces="),
            ("unshare", errno.EPERM, {"kernel/unprivileged_userns_clone": "0"}, "", "to root only", "userns_clone=1"),
            ("uid_map", errno.EPERM, {"kernel/apparmor_restrict_unprivileged_userns": "1"}, "", "AppArmor", "profile"),
            ("lo", errno.EPERM, {"kernel/apparmor_restrict_unprivileged_userns": "1"}, "", "AppArmor", "profile"),
            ("unshare", errno.ENOSPC, {}, "", "no more namespaces", "raise user.max"),
            ("unshare", errno.EINVAL, {}, "", "no such namespaces", "CONFIG_NET_NS"),
            ("unshare", errno.EPERM, {}, "Name:\tx\nSeccomp:\t2\n", "seccomp", "allows unshare"),
            ("unshare", errno.EPERM, {}, "Name:\tx\nSeccomp:\t0\n", "the kernel refuses", "ask"),
            ("child", 0, {}, "", "the kernel refuses (child failed)", "ask"),
        ],
    )
    def test_words(self, step: str, number: int, settings: dict[str, str], status: str, why: str, remedy: str) -> None:
        """A step that failed is told with what forbids it, and with what would allow it."""
        found = explained(step, number, lambda name: settings.get(name, ""), status)
        assert found
        assert why in found.why
        assert step in found.why
        assert remedy in found.remedy


class TestDoctor:
    def test_refused(self) -> None:
        """Where ranks can be reached by others, the table says why and what would change it."""
        first, second = isolation(Refusal("the kernel refuses", "another kernel"))
        assert (first.found, first.remedy) == ("no: the kernel refuses", "another kernel")
        assert "any process" in second.found

    def test_granted(self) -> None:
        """Where they can't, it says by what right."""
        first, _ = isolation(Refusal())
        assert re.fullmatch("yes, (by CAP_SYS_ADMIN|in a user namespace)", first.found)

    def test_command(self) -> None:
        """The command prints the table of this machine and ends well."""
        done = subprocess.run(
            [sys.executable, "-m", "harness.commands.main", "doctor"], capture_output=True, text=True, check=True
        )
        assert "ranks on a network of their own" in done.stdout
