"""Safe reading of the results of ranks.

A pickle calls what it names, so reading one may do anything.  The names in a pickle decide how it is read:

- Plain data, tensors, arrays, and Concord's own data classes do nothing when they are read: :func:`plain`.
- Anything else is first read in a separate process (:func:`serve`), which may die or hang.
- If that process survives, the pickle is read here, in a thread with a time limit.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from harness.worlds import wire

_PLAIN = {
    "builtins": {"bool", "complex", "float", "frozenset", "int", "set", "slice", "str"},
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "timedelta"},
    "torch": {"Size", "Tensor", "device"},
    "torch._utils": {"_rebuild_parameter", "_rebuild_tensor_v2"},
    "torch.nn.parameter": {"Parameter"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "harness.worlds.wire": {"_load_typed", "_load_untyped", "_memory_format", "_tensor_rebuilder"},
}
"""Names, by module, with which a pickle can do nothing but make data that is as large as itself.

``range`` is left out because it could fill a container forever, and ``bytearray`` because it turns a number into as
many bytes.
"""
_OURS = "harness."
DONE = b"."
"""The answer of the separate process after it has read a pickle and survived."""


class NotPlain(Exception):
    """A pickle names something that is not plain data."""


_found: dict[tuple[str, str], Any] = {}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _found.get((module, name))
        if known is not None:
            return known
        if name in _PLAIN.get(module, ()):
            known = _found[module, name] = super().find_class(module, name)
            return known
        loaded = sys.modules.get(module)
        found = getattr(loaded, name, None) if "." not in name else None
        if module.startswith(_OURS) and _is_data(found, module):
            return found
        if module == "torch" and loaded is not None and isinstance(found, (loaded.dtype, loaded.layout)):
            return found
        raise NotPlain(f"{module}.{name}")


def _is_data(found: Any, module: str) -> bool:
    """Return whether this is a class that only holds data, and that Concord's ``module`` defines rather than imports.

    Such classes are dataclasses, named tuples, enumerations and msgspec's structs.
    """
    if not isinstance(found, type) or found.__module__ != module:
        return False
    named_tuple = found.__bases__ == (tuple,) and hasattr(found, "_fields")
    return named_tuple or dataclasses.is_dataclass(found) or issubclass(found, (enum.Enum, msgspec.Struct))


def plain(body: bytes | bytearray, buffers: Sequence[bytearray]) -> Any:
    """Unpickle plain data.

    Errors: :class:`NotPlain`, before anything that is not plain is called; whatever unpickling raises.
    """
    return _Reader(io.BytesIO(body), buffers=buffers).load()


def serve(control: socket.socket, reader: wire.FrameReader) -> None:
    """Read pickles until the controller goes, and report each one as read, whatever it raised."""
    while True:
        try:
            body, buffers = wire.receive_frame(control, reader)
        except wire.WireError:
            return
        try:
            pickle.loads(body, buffers=buffers)
        except BaseException:
            pass  # the controller reads the pickle again, and reports the error
        del body, buffers
        wire.send_parts(control, wire.parts_of(DONE))
