"""Messages between a controller and its ranks: framing and pickling.

A frame is a header, a body and any number of raw buffers.  The body of a frame to a rank is a pickle; the body of a
frame from a rank is typed data, see :mod:`harness.worlds.answers`.  Tensor storages travel as raw buffers beside the
pickle (protocol 5, out of band).  So a tensor costs one copy and never a file, and tensors that share a storage also
share one on the other side.  Functions and classes that the other side cannot import are pickled by value
(cloudpickle).

A pickle is only ever read from an inherited socket pair, because reading a pickle executes what it says.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, overload

import cloudpickle

_MAGIC = b"cncd"
_HEADER = struct.Struct("!4sIQ")
_LENGTH = struct.Struct("!Q")
_AT_ONCE = 65536
_MOST = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4  # the sender has it, too, and others send as well
_MOST_BUFFERS = 1 << 20
_MOST_AHEAD = 64 << 20  # bytes of memory for data that is announced and has not arrived
_MOST_A_TURN = 64 << 20  # bytes read from a rank before others get their turn


def _remember_submodules() -> None:
    """Make cloudpickle look up only once, not for every pickle, which submodules a function refers to.

    The lookup walks all of sys.modules: 0.65 ms with torch imported, more than all the rest of a run on ranks.
    """
    original = cloudpickle.cloudpickle._find_imported_submodules
    cache: dict[Any, list[Any]] = {}

    def find(code: Any, dependencies: Iterable[Any]) -> list[Any]:
        dependencies = list(dependencies)
        modules = tuple(d.__name__ for d in dependencies if isinstance(d, ModuleType))
        key = code, modules, len(sys.modules)
        if key not in cache:
            if len(cache) > 1000:
                cache.clear()
            cache[key] = original(code, dependencies)
        return cache[key]

    cloudpickle.cloudpickle._find_imported_submodules = find


if hasattr(cloudpickle.cloudpickle, "_find_imported_submodules"):
    _remember_submodules()


class WireError(ConnectionError):
    """The peer has gone, or sent something that is not a frame."""


class NotAFrame(WireError):
    """The peer sent something that is not a frame; nothing that follows can be read."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A cloudpickle pickler that keeps the bytes of tensor storages out of the pickle stream."""

    def __init__(self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._storages: dict[int, Any] = {}  # storage identity -> the object that pickle memoizes for it

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None:
            if type(obj) is torch.storage.TypedStorage:
                untyped = obj._untyped_storage
                canonical = self._storages.setdefault(untyped._cdata, untyped)
                return _load_typed, (canonical, obj.dtype)
            if type(obj) is torch.UntypedStorage:
                return _load_untyped, (pickle.PickleBuffer(_storage_bytes(obj)),)
            if obj is getattr(torch._utils, "_rebuild_tensor_v3", ""):
                return _tensor_rebuilder, ()
            # pickle would look for a module in which torch is found, and import on the rank whichever comes first
            if type(obj) is torch.memory_format:
                return _memory_format, (str(obj).removeprefix("torch."),)
        # A module of a class of its own, such as torch.backends.cudnn, which cloudpickle does not know for one.
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def _storage_bytes(storage: Any) -> memoryview:
    """Return the bytes of a storage, without a copy if it is in host memory."""
    if storage.device.type != "cpu":
        storage = storage.cpu()
    size = storage.nbytes()
    if size == 0:
        return memoryview(b"")
    array = (ctypes.c_char * size).from_address(storage.data_ptr())
    array._keep_alive = storage
    return memoryview(array).cast("B")


def _load_untyped(data: Any) -> Any:
    import torch

    view = memoryview(data)
    if view.nbytes == 0:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _memory_format(name: str) -> Any:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.memory_format):
        raise pickle.UnpicklingError(f"torch.{name} is not a memory format")
    return found


def _load_typed(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _tensor_rebuilder() -> Any:
    return _rebuild_tensor


def _rebuild_tensor(storage: Any, *rest: Any) -> Any:
    """Rebuild a tensor of a newer dtype (uint16, float8_e8m0fnu, ...).

    torch pickles its storage without a type, but rebuilds the tensor only from a storage with a type.
    """
    import torch

    return torch._utils._rebuild_tensor_v3(_load_typed(storage, torch.uint8), *rest)  # type: ignore[no-untyped-call]


def dumps(obj: Any) -> list[bytes]:
    """Pickle ``obj`` into the parts of one frame, ready for :func:`send_parts`.

    Errors: whatever pickling raises, unchanged; the caller knows what it tried to send.
    """
    return parts_of(*pickled(obj))


def pickled(obj: Any) -> tuple[bytes, list[bytes]]:
    """Pickle ``obj``; returns the pickle, and the bytes of its storages.  Errors: those of :func:`dumps`."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, buffers.append).dump(obj)
    # These are copies on purpose: a view of a view in a reference cycle crashes CPython 3.11's garbage collector.  The
    # locals of a frame that an exception holds end up in such a cycle.
    raw = [bytes(b.raw()) for b in buffers]
    buffers.clear()
    return file.getvalue(), raw


def parts_of(body: bytes, raw: Sequence[bytes] = ()) -> list[bytes]:
    """Return the parts of a frame with this body and these raw buffers, ready for :func:`send_parts`."""
    head = _HEADER.pack(_MAGIC, len(raw), len(body)) + b"".join(_LENGTH.pack(len(b)) for b in raw)
    return [head, body, *raw]


def plain(obj: Any) -> list[bytes]:
    """Like :func:`dumps`, but faster, for an object of plain values that the standard pickler can handle."""
    body = pickle.dumps(obj, protocol=5)
    return [_HEADER.pack(_MAGIC, 0, len(body)), body]


def send_parts(sock: socket.socket, parts: list[bytes]) -> None:
    """Write the parts of a frame to a socket.  Errors: :class:`WireError` if the peer has gone or does not read."""
    try:
        if sum(len(p) for p in parts) < 65536:
            sock.sendall(b"".join(parts))
        else:
            for part in parts:
                sock.sendall(part)
    except TimeoutError as e:
        raise WireError("the peer does not read") from e
    except OSError as e:
        raise WireError(f"the peer has gone ({e.strerror or e})") from e


def send(sock: socket.socket, obj: Any) -> None:
    """Pickle and write one object."""
    send_parts(sock, dumps(obj))


class FrameReader:
    """Assembles frames from the bytes that have arrived so far; never waits longer than the socket does."""

    def __init__(self, sock: socket.socket, *, greedy: bool = True) -> None:
        self._sock = sock
        self._greedy = greedy  # whether it may read on, because nobody else reads this socket
        self._feed = self._frames()
        self._want: memoryview = next(self._feed)
        self._got = 0
        self._fresh = True  # between two frames
        self._announced = 0
        self._arrived = 0
        self._frame: tuple[bytearray, list[bytearray]] | None = None
        self.ahead: bytes | None = b""
        """Bytes that were read beyond the last frame."""

    def _frames(self) -> Iterator[memoryview]:
        # Yields the next buffer to fill; when a frame is whole, leaves it in self._frame.
        while True:
            head = bytearray(_HEADER.size)
            yield memoryview(head)
            magic, count, size = _HEADER.unpack(head)
            if magic != _MAGIC:
                raise NotAFrame(f"it begins with {bytes(head)!r}")
            if not size:
                raise NotAFrame("there is nothing in it")
            if size > _MOST or count > _MOST_BUFFERS:
                raise NotAFrame(f"it announces {size:,} bytes and {count:,} buffers")
            lengths = bytearray(_LENGTH.size * count)
            if count:
                yield memoryview(lengths)
            total = size + sum(n for (n,) in _LENGTH.iter_unpack(lengths))
            if total > _MOST:
                raise NotAFrame(f"it announces {total:,} bytes, more than a quarter of this machine's memory")
            self._announced = total
            try:
                body = yield from _filled(size)
                buffers = []
                for (n,) in _LENGTH.iter_unpack(lengths):
                    buffers.append((yield from _filled(n)))
            except MemoryError:
                raise NotAFrame(f"there is no memory for its {total:,} bytes") from None
            self._frame = body, buffers

    @property
    def begun(self) -> str:
        """How much of an unfinished frame has arrived, in words; empty between two frames."""
        if self._fresh:
            return f"{len(self.ahead):,} bytes of an answer" if self.ahead else ""
        whole = f" of {self._announced:,} bytes" if self._announced else ""
        return f"{self._arrived:,} bytes of an answer{whole}"

    def read(self) -> tuple[bytes | bytearray, list[bytearray]] | None:
        """Take what the socket has; return a complete frame, or None if more must arrive first.

        As long as :attr:`ahead` is not empty, there may be another complete frame that the socket does not show.
        Errors: :class:`WireError` at end of stream or for bytes that are not a frame.
        """
        if self._greedy and self._fresh and not self.ahead:
            self.ahead = self._receive(_AT_ONCE)
            if self.ahead is None:
                return None
        if self._fresh and self.ahead and len(self.ahead) >= _HEADER.size:
            # A small frame that has arrived completely, as nearly all do, needs no assembly.
            magic, count, size = _HEADER.unpack_from(self.ahead)
            end = _HEADER.size + size
            if magic == _MAGIC and count == 0 and len(self.ahead) >= end:
                body, self.ahead = self.ahead[_HEADER.size : end], self.ahead[end:]
                return body, []
        turn = self._arrived = 0 if self._fresh else self._arrived
        while self._frame is None:
            if self._arrived - turn > _MOST_A_TURN:
                return None
            self._fresh = False
            if not self._want:
                raise NotAFrame("it follows something that is none")
            want = self._want[self._got :]
            if self.ahead:
                n = min(len(want), len(self.ahead))
                want[:n] = self.ahead[:n]
                self.ahead = self.ahead[n:]
            else:
                got = self._receive(want)
                if got is None:
                    return None
                n = got
            self._got += n
            self._arrived += n
            if self._got == len(self._want):
                want.release()
                self._want.release()  # a buffer can't grow while there is a view of it
                self._want, self._got = memoryview(b""), 0
                self._want = next(self._feed)
        frame, self._frame = self._frame, None
        self._fresh, self._announced = True, 0
        return frame

    @overload
    def _receive(self, into: int) -> bytes | None: ...
    @overload
    def _receive(self, into: memoryview) -> int | None: ...
    def _receive(self, into: int | memoryview) -> bytes | int | None:
        """Read at most so many bytes, or into a buffer; None if nothing has arrived."""
        try:
            got = self._sock.recv(into) if isinstance(into, int) else self._sock.recv_into(into)
        except (BlockingIOError, InterruptedError):
            return None
        except TimeoutError:
            raise WireError("no answer in time") from None
        except OSError as e:
            raise WireError(f"the peer has gone ({e.strerror or e})") from e
        if not got:
            raise WireError("the peer closed the connection")
        return got


def _filled(size: int) -> Generator[memoryview, None, bytearray]:
    """Yield the parts of a new buffer of ``size`` bytes, one by one, to be filled; returns the buffer.

    The buffer grows as it is filled, so a peer that announces more than it sends gets no memory for it.
    """
    buffer = bytearray(min(size, _MOST_AHEAD))
    if size:  # an empty tensor has no bytes
        yield memoryview(buffer)
    while len(buffer) < size:
        begin = len(buffer)
        buffer.extend(bytes(min(begin, size - begin)))
        yield memoryview(buffer)[begin:]
    return buffer


def loads(frame: tuple[bytes | bytearray, list[bytearray]]) -> Any:
    """Unpickle a frame.  Errors: whatever unpickling raises, unchanged."""
    body, buffers = frame
    return pickle.loads(body, buffers=buffers)


def receive(sock: socket.socket, reader: FrameReader | None = None, timeout: float | None = None) -> Any:
    """Read one object from a blocking socket, waiting at most ``timeout`` seconds.

    Errors: :class:`WireError` when the peer has gone or the time is over.
    """
    return loads(receive_frame(sock, reader, timeout))


def receive_frame(
    sock: socket.socket, reader: FrameReader | None = None, timeout: float | None = None
) -> tuple[bytes | bytearray, list[bytearray]]:
    """Like :func:`receive`, but return the frame without unpickling it."""
    reader = reader or FrameReader(sock, greedy=False)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        if deadline is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        frame = reader.read()
        if frame is not None:
            return frame
        if deadline is not None and time.monotonic() >= deadline:
            raise WireError("no answer in time")
