"""Environment variables that results may have: their names, and the kind of value that is shown for each.

Other variables are not recorded.  A value that is not of its variable's kind is recorded as :data:`NOT_SHOWN`, which
shows only that the variable was set.  Families (``NCCL_*``) take only switches and numbers; a variable with another
kind of value has its own line.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable

from harness.redaction.arguments import without_values
from harness.redaction.named import without_named
from harness.redaction.shapes import is_path, looks_random, says_secret
from harness.redaction.urls import Url, without_credentials

NOT_SHOWN = "set, not shown"
"""Replaces a value that is not of the kind that its variable takes."""

Kind = Callable[[str], str | None]
"""A function from a value to the part that is shown; None: nothing is shown."""

_SWITCH = r"true|false|yes|no|on|off|[yntf]|enabled?|disabled?|none|auto|default|always|never"
_NUMBER = r"[-+]?\d{1,12}(?:\.\d{1,6})?(?:e[-+]?\d{1,3})?\s?(?:[KMGT]i?B?|B|[smhd]|[mun]s|min)?"


def _like(pattern: str) -> Kind:
    # Compiled on first use, because every pytest run in the environment imports this file.
    return lambda value: value if re.fullmatch(pattern, value, re.IGNORECASE) and not looks_random(value) else None


def _paths(value: str) -> str | None:
    """Show paths that are separated by ``:``."""
    return value if all(map(_is_path, value.split(":"))) else None


def _is_path(text: str) -> bool:
    if os.path.lexists(text):
        return True
    return not re.search(r"[?&=@#]", text) if is_path(text) else bool(_PATH.fullmatch(text)) and not looks_random(text)


def _place(value: str) -> str | None:
    """Show a path, or a URL without its credentials."""
    return str(Url(value)) if re.match(r"[A-Za-z][\w+.-]{0,30}://", value) else _paths(value)


def _devices(value: str) -> str | None:
    """Show ordinals, ranges and UUIDs of devices that are separated by ``,`` or ``;``."""
    return value if all(map(_DEVICE.fullmatch, re.split(r" ?[,;] ?", value))) else None


def _commit(value: str) -> str | None:
    return value if re.fullmatch(r"[0-9a-f]{7,40}", value) else _VERSION(value)


def _command_line(value: str) -> str | None:
    try:
        arguments = without_values(shlex.split(value))
    except ValueError:  # an unclosed quote
        return None
    return shlex.join(without_named(without_credentials(argument)) for argument in arguments)


_PATH = re.compile(r"[\w./+~ -]*")
_SETTING = _like(rf"|{_SWITCH}|{_NUMBER}")
_DEVICE = re.compile(
    r"[*-]?\d{0,4}|\d{1,4}[.:-]\d{1,4}|(?:GPU|MIG)-[0-9a-f-]{4,40}|[a-z_]{1,12}:(?:\d{1,4}|\*|[acgn]pu)|all|none|void",
    re.IGNORECASE,
)
_INTERFACES = _like(r"[=^]{0,2}[a-z][\w.@:-]{0,14}(?:,[a-z][\w.@:-]{0,14}){0,15}")
_VERSION = _like(r"v?\d{1,4}(?:[._]\w{1,12}){0,5}(?:[+-][\w.]{1,20})?")
_SEED = _like(r"random|default|free|\d{1,20}")
_WORDS = _like(r"[-+^]?[A-Za-z][A-Za-z0-9_]{0,23}(?:[,:;+ ][-+^]?[A-Za-z][A-Za-z0-9_]{0,23}){0,15}")
_MODULES = _like(r"[A-Za-z_]\w*(?:\.\w+)*(?:,[A-Za-z_]\w*(?:\.\w+)*)*")
_OPTIONS = _like(
    rf"[A-Za-z][\w-]*(?:[:=](?:{_SWITCH}|{_NUMBER}|[a-z_]{{1,24}}|\[[\d:, a-z-]*\]))?"
    rf"(?:,(?:[A-Za-z][\w-]*|{_NUMBER})(?:[:=](?:{_SWITCH}|{_NUMBER}|[a-z_]{{1,24}}|\[[\d:, a-z-]*\]))?)*"
)
"""``expandable_segments:True,max_split_size_mb:128``, ``granularity=fine,compact,1,0``."""
_LABEL = _like(r"[A-Za-z0-9][\w .()-]{0,39}")

_NAMES: dict[str, Kind] = {
    **dict.fromkeys(("CI", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTHONSAFEPATH", "PYTHONNOUSERSITE"), _SETTING),
    **dict.fromkeys(("PYTHONOPTIMIZE", "PYTHONINSPECT", "PYTHONDEVMODE"), _SETTING),
    "PYTHONHASHSEED": _SEED,
    "PYTHONWARNINGS": _OPTIONS,
    "PYTHONBREAKPOINT": _MODULES,
    "PYTEST_PLUGINS": _MODULES,
    "PYTEST_ADDOPTS": _command_line,
    **dict.fromkeys(("PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX"), _paths),
    **dict.fromkeys(("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "COVERAGE_PROCESS_START"), _paths),
    "CONCORD_EXAMPLES": _like(rf"smoke|default|thorough|{_NUMBER}"),
    "CONCORD_BUDGET": _SETTING,
    "CONCORD_COMMIT": _commit,
    "CONCORD_HISTORY": _place,
    "CONCORD_MACHINE": _LABEL,
    **dict.fromkeys(("CONCORD_REPRODUCERS", "CONCORD_STATE", "HYPOTHESIS_STORAGE_DIRECTORY"), _paths),
    "NCCL_DEBUG": _like("version|warn|info|trace|abort"),
    "NCCL_DEBUG_SUBSYS": _WORDS,
    **dict.fromkeys(("NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN"), _WORDS),
    **dict.fromkeys(("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"), _like(rf"{_NUMBER}|LOC|NVL|PIX|PXB|PXN|PHB|NODE|SYS")),
    **dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "NCCL_IB_HCA"), _INTERFACES),
    **dict.fromkeys(("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE", "NCCL_DEBUG_FILE"), _paths),
    **dict.fromkeys(("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), _paths),
    **dict.fromkeys(("CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH", "ROCM_HOME", "ROCM_PATH"), _paths),
    "GLOO_DEVICE_TRANSPORT": _like("tcp|tcp_tls|uv|ibverbs"),
    "TORCH_LOGS": _WORDS,
    "TORCH_DISTRIBUTED_DEBUG": _like("off|info|detail"),
    **dict.fromkeys(("TORCH_CPP_LOG_LEVEL", "OMPI_MCA_btl", "UCX_TLS", "MPICH_GPU_SUPPORT_ENABLED"), _WORDS),
    **dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"), _OPTIONS),
    **dict.fromkeys(("KMP_AFFINITY", "OMP_PLACES", "GOMP_CPU_AFFINITY", "OMP_DISPLAY_ENV", "MALLOC_CONF"), _OPTIONS),
    **dict.fromkeys(("OMP_PROC_BIND", "OMP_SCHEDULE"), _WORDS),
    "OMP_NUM_THREADS": _like(r"\d{1,6}(,\d{1,6})*"),
    "CUDA_DEVICE_ORDER": _like("FASTEST_FIRST|PCI_BUS_ID"),
    "CUDA_MODULE_LOADING": _like("default|lazy|eager"),
    "CUDA_LAUNCH_BLOCKING": _SETTING,
    "HSA_OVERRIDE_GFX_VERSION": _VERSION,
}
_FAMILIES: tuple[tuple[re.Pattern[str], Kind], ...] = (
    (re.compile(r"\w+_VISIBLE_DEVICES|\w+_AFFINITY_MASK|ONEAPI_DEVICE_SELECTOR"), _devices),
    (
        re.compile(
            r"(TORCH|TORCH_NCCL|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON|NCCL|RCCL|GLOO|UCC|UCX|MPI|MPICH|OMPI|CUDA|HIP"
            r"|HSA|ROCR|XPU|ZE|ONEAPI|CCL|OMP|GOMP|MKL|KMP|MALLOC|CONCORD|HYPOTHESIS)_\w+"
            r"|PYTEST_(?!CURRENT_TEST|VERSION|XDIST)\w+"
        ),
        _SETTING,
    ),
)
_KNOWN: dict[str, Kind] = {
    **dict.fromkeys(("HOSTNAME", "HOST", "NAME", "USER", "LOGNAME", "USERNAME"), _like(r"[\w.-]{1,64}")),
    **dict.fromkeys(("PWD", "OLDPWD", "HOME", "TMPDIR", "SSH_AUTH_SOCK"), _paths),
    **dict.fromkeys(("GITHUB_SHA", "GIT_COMMIT", "CI_COMMIT_SHA"), _commit),
}
"""Harmless variables that results do not need."""


def of_kind(name: str, value: str) -> str | None:
    """Return what may be shown of a listed variable, judged by its value alone; None: the variable is not listed."""
    kind = _NAMES.get(name) or next((kind for names, kind in _FAMILIES if names.fullmatch(name)), None)
    if kind is None or says_secret(name):
        return None
    shown = kind(value) if len(value) <= 4096 else None
    return NOT_SHOWN if shown is None else without_named(shown)


def is_plain(name: str, value: str) -> bool:
    """Return whether a variable is known and its whole value is of its kind, so that it has no credential."""
    kind = _KNOWN.get(name)
    return kind(value) == value if kind is not None else name != "PYTEST_ADDOPTS" and of_kind(name, value) == value
