"""What an agent says about its host, and which differences between hosts keep ranks from being started."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.cluster import messages
from harness.devices import Inventory, at_host, slot, usable_cores
from harness.provenance import environment, version_of

_PASSED_ON = ("CONCORD_", "CUBLAS_", "CUDA_", "GLOO_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "UCC_", "UCX_")
"""Beginnings of the names of variables that a session passes on to ranks on every host."""
_OF_A_HOST = ("VISIBLE_DEVICES", "_IFNAME", "_HOSTID", "_HCA", "_HISTORY", "_LEASES", "_FILE", "_DIR", "_PATH")
"""Parts of the names of variables that are about one host, or are of no use on another."""
_OF_THE_AGENT = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR", "CONCORD_SERVER", "CONCORD_PRELOAD", "OMP_NUM_THREADS")
"""Variables that an engine sets for each agent, or that are about the agent alone."""

_MUST_AGREE = ("python", "torch", "torch commit", "machine", "concord", "package cloudpickle")
"""Facts that are the same wherever ranks of one world run: functions travel as bytecode and pickles."""


def facts() -> dict[str, Any]:
    """Return what an agent says about its host: versions, variables and names.  Does not import torch."""
    known: dict[str, Any] = {
        **environment({}),
        "concord": _code(),
        "package cloudpickle": version_of("cloudpickle"),
        "host": socket.gethostname(),
        "kernel": _kernel(),
        "cores": usable_cores(),
        "pid": os.getpid(),
    }
    return {**known, "variables": passed_on(os.environ), "path": [each for each in sys.path if isinstance(each, str)]}


def passed_on(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on every host get from the session: settings of PyTorch and its libraries."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(_PASSED_ON)
        and not any(part in name for part in _OF_A_HOST)
        and not name.startswith(_OF_THE_AGENT)
    }


def slots(hosts: Sequence[Mapping[str, Any]], ours: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of all cores of some hosts, each once, though several agents may be on one machine.

    Cores of this machine have the keys that sessions without agents use.
    """
    keys: dict[str, None] = {}
    for host in hosts:
        keys.update((_across(slot(core), host, ours), None) for core in host.get("cores", ()))
    return tuple(keys)


def accelerators(
    hosts: Sequence[Mapping[str, Any]], devices: Sequence[messages.Devices], ours: Mapping[str, Any]
) -> Inventory:
    """Return the accelerators of all of some hosts, each once: with the first of the agents that see it.

    ``devices``: those of each host, all of one type.
    """
    names: dict[str, tuple[str, int]] = {}
    for number, (host, found) in enumerate(zip(hosts, devices, strict=True)):
        for device, key in zip(found.devices, found.keys, strict=True):
            names.setdefault(_across(key, host, ours), (at_host(device, number), number))
    return Inventory(
        devices[0].kind,
        tuple(name for name, _ in names.values()),
        tuple(names),
        tuple(number for _, number in names.values()),
    )


def _across(key: str, host: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return what identifies a device of a host among those of all machines: its key, if the machine is ours."""
    kernel = host.get("kernel", "")
    return key if kernel == ours.get("kernel") else f"{kernel}-{key}"


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return why ranks on the host of ``theirs`` can't work for a session with our facts, a phrase each.

    Variables that only the agent has are a difference: the ranks beside it would behave in another way than those of
    other hosts.
    """
    wrong = [
        f"{name} is {theirs.get(name) or 'missing'} there and {ours.get(name) or 'missing'} here"
        for name in _MUST_AGREE
        if theirs.get(name) != ours.get(name)
    ]
    here, there = ours.get("variables") or {}, theirs.get("variables") or {}
    wrong += [f"the variable {name} is set there and not here" for name in sorted(there) if name not in here]
    return wrong


def _kernel() -> str:
    """Return an id of the running kernel, by which agents on one machine are recognized; empty if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _code() -> str:
    """Return a digest of the harness, as it would be imported."""
    root = Path(__file__).parents[1]
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(root).as_posix()}\n"
        for path in sorted(root.rglob("*.py"))
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]
