"""Frames between a controller and its ranks."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.worlds import wire
from harness.worlds.wire import FrameReader, WireError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def through(obj: Any) -> Any:
    """``obj`` after a trip over a socket pair."""
    with pair() as (ours, theirs):
        sender = threading.Thread(target=wire.send, args=(ours, obj))
        sender.start()
        try:
            return wire.receive(theirs, timeout=30)
        finally:
            sender.join()


@pytest.mark.parametrize("thing", [torch.float32, torch.strided, torch.channels_last], ids=str)
def test_constants_of_torch(thing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrive by the name of torch, and not of the first module, such as another test's, in which pickle finds them."""
    other = ModuleType("imported_before_torch")
    other.torch, other.float32 = torch, torch.float32  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "modules", {other.__name__: other, **sys.modules})
    body, _ = wire.pickled([thing])
    assert b"imported_before_torch" not in body
    assert through([thing]) == [thing]


@pytest.mark.parametrize("name", ["load", "float32", "nothing"])
def test_other_than_memory_formats(name: str) -> None:
    """What reads a memory format gives nothing else of torch, whoever wrote the pickle."""
    with pytest.raises(pickle.UnpicklingError, match=f"torch.{name} is not a memory format"):
        wire._memory_format(name)


def test_module_of_a_class_of_its_own() -> None:
    """A function may name torch.backends.cudnn, whose switches are properties of its class."""
    assert through(torch.backends.cudnn) is torch.backends.cudnn
    assert through(lambda: torch.backends.cudnn.enabled)() == torch.backends.cudnn.enabled


def frame_of(obj: Any) -> bytes:
    return b"".join(bytes(part) for part in wire.dumps(obj))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@dataclass
class Sample:
    name: str
    size: int


class TestRoundTrip:
    @pytest.mark.parametrize(
        "obj",
        [
            None,
            True,
            -(1 << 80),
            "text \N{SNOWMAN}",
            "half a surrogate pair: \ud800",
            b"\x00\xff" * 10,
            [1, (2, {3: {4}})],
            frozenset({"a"}),
            Sample("x", 3),
            Sample,
            len,
            ValueError("x").args,
            torch.float32,
            torch.Size([2, 3]),
            torch.device("cpu"),
        ],
        ids=repr,
    )
    def test_plain_objects(self, obj: Any) -> None:
        """What pickle can carry arrives equal."""
        assert obj == through(obj)

    def test_equal_to_nothing(self) -> None:
        """An empty message is a message."""
        assert through(()) == ()

    def test_lambda(self) -> None:
        """A lambda travels by value."""
        assert through(lambda x: x + 1)(1) == 2

    def test_closure(self) -> None:
        """A closure takes along what it closes over, tensors too."""
        weight = torch.arange(3.0)

        def scaled(by: float) -> list[float]:
            return (weight * by).tolist()

        assert through(scaled)(2) == [0.0, 2.0, 4.0]

    def test_class_of_a_test(self) -> None:
        """A class that nobody can import travels by value, with its instances."""

        class Local:
            def __init__(self, x: int) -> None:
                self.x = x

            def twice(self) -> int:
                return 2 * self.x

        assert through(Local(4)).twice() == 8

    def test_recursive_function(self) -> None:
        """A local function that calls itself finds itself on the other side."""

        def factorial(n: int) -> int:
            return 1 if n < 2 else n * factorial(n - 1)

        assert through(factorial)(5) == 120

    def test_several_frames(self) -> None:
        """Frames sent one after another arrive one by one, in order."""
        with pair() as (ours, theirs):
            for i in range(5):
                wire.send(ours, torch.full((i,), i))
            reader = FrameReader(theirs)
            assert list(range(5)) == [len(wire.receive(theirs, reader, timeout=30)) for _ in range(5)]

    def test_unpicklable(self) -> None:
        """An object that can't be pickled raises before a byte is sent."""
        with pair() as (ours, theirs):
            with pytest.raises(TypeError):
                wire.send(ours, [torch.zeros(3), threading.Lock()])
            theirs.setblocking(False)
            assert FrameReader(theirs).read() is None

    def test_load_error_is_the_objects_own(self) -> None:
        """What unpickling raises is not disguised, and the stream goes on behind it."""

        class Broken:
            def __reduce__(self) -> Any:
                return int, ("no number",)

        with pair() as (ours, theirs):
            wire.send(ours, Broken())
            wire.send(ours, "next")
            reader = FrameReader(theirs)
            with pytest.raises(ValueError, match="no number"):
                wire.receive(theirs, reader, timeout=30)
            assert wire.receive(theirs, reader, timeout=30) == "next"


class TestTensors:
    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @pytest.mark.parametrize("shape", [(5,), (), (0,), (2, 0, 3), (2, 3)], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Every dtype arrives with its dtype, shape and bits."""
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.arange(count).to(torch.uint8)
        sent = (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)
        got = through(sent)
        assert (sent.dtype, sent.shape, bits(sent)) == (got.dtype, got.shape, bits(got))

    def test_nan_payload(self) -> None:
        """The bits of a NaN arrive as they were."""
        sent = torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
        assert bits(sent) == bits(through(sent))

    @pytest.mark.parametrize(
        "view",
        [
            lambda t: t.t(),
            lambda t: t[::2, 1:],
            lambda t: t[:, 2],
            lambda t: t.expand(2, 4, 6),
            lambda t: t.as_strided((3, 3), (1, 1), 5),
            lambda t: t.flatten()[7],
        ],
        ids=["transposed", "strided", "column", "expanded", "overlapping", "offset"],
    )
    def test_not_contiguous(self, view: Any) -> None:
        """A view keeps its values, strides and offset."""
        sent = view(torch.arange(24.0).reshape(4, 6))
        got = through(sent)
        assert (sent.tolist(), sent.stride(), sent.storage_offset()) == (
            got.tolist(),
            got.stride(),
            got.storage_offset(),
        )

    def test_received_is_writable(self) -> None:
        """What arrives can be written in place."""
        assert through(torch.zeros(2)).add_(1).tolist() == [1.0, 1.0]

    def test_received_is_a_copy(self) -> None:
        """Writing to what arrived leaves what was sent alone."""
        sent = torch.zeros(2)
        through(sent).add_(1)
        assert sent.tolist() == [0.0, 0.0]

    def test_shared_storage(self) -> None:
        """Views of one storage still share it."""
        base = torch.zeros(6)
        whole, part = through([base, base[2:4]])
        part.fill_(7)
        assert whole.tolist() == [0, 0, 7, 7, 0, 0]

    @pytest.mark.parametrize("other", [torch.int32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16], ids=str)
    def test_shared_storage_of_other_dtype(self, other: torch.dtype) -> None:
        """Views of one storage with different dtypes still share it."""
        base = torch.ones(4)
        whole, part = through([base, base.view(other)])
        part.view(torch.uint8).zero_()
        assert whole.tolist() == [0.0] * 4

    def test_shared_storage_is_sent_once(self) -> None:
        """Ten views of a storage cost the bytes of one."""
        base = torch.zeros(100_000)
        assert len(frame_of([base[i:] for i in range(10)])) < 2 * base.nbytes

    def test_different_storages_stay_apart(self) -> None:
        """Temporaries whose memory is used again while pickling don't get mixed up."""

        class Makes:
            def __init__(self, value: float) -> None:
                self.value = value

            def __reduce__(self) -> Any:
                return list, ([torch.full((50,), self.value), torch.full((50,), -self.value)],)

        got = through([Makes(float(i)) for i in range(20)])
        assert [(float(i), -float(i)) for i in range(20)] == [(a[0].item(), b[49].item()) for a, b in got]

    def test_same_tensor_twice(self) -> None:
        """One tensor in two places is one tensor on the other side."""
        t = torch.zeros(3)
        a, b = through([t, t])
        assert a is b

    @pytest.mark.parametrize("flag", [True, False])
    def test_requires_grad(self, flag: bool) -> None:
        """requires_grad is kept."""
        assert flag == through(torch.ones(2, requires_grad=flag)).requires_grad

    def test_parameter(self) -> None:
        """A Parameter stays one, with its flag."""
        got = through(torch.nn.Parameter(torch.ones(2), requires_grad=False))
        assert (torch.nn.Parameter, False) == (type(got), got.requires_grad)

    def test_module(self) -> None:
        """A module computes the same on the other side."""
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU()).eval()
        x = torch.randn(2, 3)
        assert module(x).tolist() == through(module)(x).tolist()

    def test_tied_parameters(self) -> None:
        """Tied parameters stay tied."""
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        module[1].weight = module[0].weight
        got = through(module)
        assert got[0].weight is got[1].weight

    def test_state_dict(self) -> None:
        """A state dict arrives with its keys in order and its values."""
        sent = torch.nn.Linear(3, 2).state_dict()
        got = through(sent)
        assert [(k, v.tolist()) for k, v in sent.items()] == [(k, v.tolist()) for k, v in got.items()]

    def test_large(self) -> None:
        """64 MB arrive whole."""
        sent = torch.arange(16 << 20, dtype=torch.int32)
        assert torch.equal(sent, through(sent))

    def test_meta(self) -> None:
        """A meta tensor keeps shape, stride and dtype; it has no bytes to lose."""
        sent = torch.empty(3, 4, dtype=torch.bfloat16, device="meta").t()
        got = through(sent)
        assert (sent.device, sent.shape, sent.stride(), sent.dtype) == (got.device, got.shape, got.stride(), got.dtype)

    def test_sparse(self) -> None:
        """A sparse tensor keeps its values."""
        sent = torch.eye(3).to_sparse()
        assert sent.to_dense().tolist() == through(sent).to_dense().tolist()

    def test_no_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tensor travels without a file, a mapping or a descriptor that stays."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        through(torch.zeros(3))
        before = os.listdir("/proc/self/fd")
        got = through([torch.zeros(1 << 20), torch.nn.Linear(100, 100)])
        left = [*tmp_path.iterdir(), *Path("/dev/shm").glob(f"*_{os.getpid()}_*")]
        shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/torch" in line]
        assert ([], [], len(before)) == (left, shared, len(os.listdir("/proc/self/fd")))
        assert len(got) == 2


class TestGarbage:
    def test_wrong_magic(self) -> None:
        """A stream that does not begin as a frame does is refused with what it began with."""
        with pair() as (ours, theirs):
            ours.sendall(b"HTTP/1.1 400 Bad Request\r\n")
            with pytest.raises(WireError, match="HTTP"):
                wire.receive(theirs, timeout=30)

    def test_truncated_anywhere(self) -> None:
        """A frame cut off at any byte is incomplete while the peer lives, and a WireError once it has gone."""
        frame = frame_of([torch.arange(2.0), "x"])
        for length in range(len(frame)):
            with pair() as (ours, theirs):
                theirs.setblocking(False)
                reader = FrameReader(theirs)
                ours.sendall(frame[:length])
                assert reader.read() is None
                ours.close()
                with pytest.raises(WireError, match="closed"):
                    reader.read()

    @pytest.mark.parametrize(
        ("count", "size"),
        [(0, (1 << 64) - 1), (0, 1 << 62), ((1 << 32) - 1, 10), ((1 << 20) + 1, 10)],
        ids=["body 2^64", "body 2^62", "buffers 2^32", "buffers 2^20"],
    )
    def test_absurd_header(self, count: int, size: int) -> None:
        """A header that announces more than can be is refused before anything is allocated."""
        with pair() as (ours, theirs):
            ours.sendall(struct.pack("!4sIQ", b"cncd", count, size))
            with pytest.raises(WireError, match="announces"):
                wire.receive(theirs, timeout=30)

    @pytest.mark.parametrize("lengths", [[(1 << 64) - 1], [1 << 62], [1 << 63, 1 << 63], [5, 1 << 50]], ids=str)
    def test_absurd_buffer(self, lengths: list[int]) -> None:
        """A buffer longer than can be is refused before anything is allocated."""
        with pair() as (ours, theirs):
            ours.sendall(struct.pack("!4sIQ", b"cncd", len(lengths), 4) + struct.pack(f"!{len(lengths)}Q", *lengths))
            with pytest.raises(WireError, match="announces"):
                wire.receive(theirs, timeout=30)

    def test_lengths_add_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Many buffers that are each possible and together are not, are refused."""
        monkeypatch.setattr(wire, "_MOST", 1000)
        with pair() as (ours, theirs):
            ours.sendall(struct.pack("!4sIQ3Q", b"cncd", 3, 4, 400, 400, 400))
            with pytest.raises(WireError, match="announces"):
                wire.receive(theirs, timeout=30)

    def test_empty_body(self) -> None:
        """A frame without a pickle in it is an error and not a wait."""
        with pair() as (ours, theirs):
            ours.sendall(struct.pack("!4sIQ", b"cncd", 0, 0))
            with pytest.raises(WireError):
                wire.receive(theirs, timeout=30)

    def test_after_an_error(self) -> None:
        """A reader that has seen garbage goes on saying so."""
        with pair() as (ours, theirs):
            ours.sendall(b"x" * 100)
            reader = FrameReader(theirs)
            for _ in range(3):
                with pytest.raises(WireError):
                    wire.receive(theirs, reader, timeout=30)

    def test_frames_that_arrive_together(self) -> None:
        """Frames that one read brings are given out one by one, and a part of one waits for its rest."""
        sent = [1, "two", torch.arange(3), [4], torch.ones(100_000), 6]
        data = b"".join(part for item in sent for part in wire.dumps(item))
        with pair() as (ours, theirs):
            reader = FrameReader(theirs)
            writer = threading.Thread(target=ours.sendall, args=(data,))
            writer.start()
            found = [wire.receive(theirs, reader, timeout=30) for _ in sent]
            writer.join()
        assert [f.tolist() if isinstance(f, torch.Tensor) else f for f in found] == [
            s.tolist() if isinstance(s, torch.Tensor) else s for s in sent
        ]
        assert reader.ahead == b""

    def test_closed_peer_reading(self) -> None:
        """Reading from a peer that has closed says that it has."""
        with pair() as (ours, theirs):
            ours.close()
            with pytest.raises(WireError, match="closed"):
                wire.receive(theirs, timeout=30)

    def test_closed_peer_writing(self) -> None:
        """Writing to a peer that has gone says that it has."""
        with pair() as (ours, theirs):
            theirs.close()
            with pytest.raises(WireError, match="gone"):
                wire.send(ours, "x")

    def test_closed_by_ourselves(self) -> None:
        """A connection that we have closed ourselves is an error of the same kind."""
        with pair() as (ours, _):
            ours.close()
            with pytest.raises(WireError):
                wire.receive(ours)

    def test_peer_that_does_not_read(self) -> None:
        """Writing to a peer that does not read ends at the socket's time limit."""
        with pair() as (ours, _):
            ours.settimeout(0.05)
            with pytest.raises(WireError, match="does not read"):
                wire.send(ours, torch.zeros(4 << 20))

    def test_peer_that_does_not_answer(self) -> None:
        """Waiting for a peer that says nothing ends at the time limit, and is not called its end."""
        with pair() as (_, theirs), pytest.raises(WireError, match="no answer in time"):
            wire.receive(theirs, timeout=0.05)

    def test_peer_that_answers_half(self) -> None:
        """Half a frame is no answer."""
        with pair() as (ours, theirs):
            ours.sendall(frame_of("x" * 100)[:50])
            with pytest.raises(WireError, match="no answer in time"):
                wire.receive(theirs, timeout=0.05)

    @settings(deadline=None, max_examples=200)
    @given(st.binary(max_size=400), st.booleans())
    def test_random_bytes(self, data: bytes, magic: bool) -> None:
        """Whatever bytes come, a reader gives a frame, nothing yet, or a WireError."""
        data = b"cncd\x00\x00\x00" + data if magic else data
        with pair() as (ours, theirs):
            theirs.setblocking(False)
            ours.sendall(data)
            ours.close()
            reader = FrameReader(theirs)
            try:
                while reader.read() is not None:
                    pass
            except WireError:
                pass

    @settings(deadline=None, max_examples=200)
    @given(st.data())
    def test_damaged_frame(self, data: st.DataObject) -> None:
        """A frame with one byte changed never gives anything but a frame, nothing yet, or a WireError."""
        frame = bytearray(frame_of({"t": torch.arange(3), "x": 1}))
        frame[data.draw(st.integers(0, 31))] = data.draw(st.integers(0, 255))
        with pair() as (ours, theirs), pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "_MOST", 1 << 20)
            theirs.setblocking(False)
            ours.sendall(frame)
            try:
                FrameReader(theirs).read()
            except WireError:
                pass


class TestIncremental:
    def test_byte_by_byte(self) -> None:
        """A reader that gets one byte at a time gives the frame with the last one, and not before."""
        frame = frame_of([torch.arange(3.0), torch.zeros(0), {"k": "v"}])
        with pair() as (ours, theirs):
            theirs.setblocking(False)
            reader = FrameReader(theirs)
            whole = []
            for i in range(len(frame)):
                ours.sendall(frame[i : i + 1])
                whole.append(reader.read())
        assert whole[:-1] == [None] * (len(frame) - 1)
        assert wire.loads(whole[-1])[0].tolist() == [0.0, 1.0, 2.0]

    @pytest.mark.parametrize("piece", [1, 7, 1000])
    def test_grows_as_it_is_filled(self, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A frame that is larger than what memory is given for in advance arrives whole, in whatever pieces."""
        monkeypatch.setattr(wire, "_MOST_AHEAD", 8)
        sent = {"numbers": torch.arange(37), "text": "x" * 100}
        frame = frame_of(sent)
        with pair() as (ours, theirs):
            theirs.setblocking(False)
            reader = FrameReader(theirs)
            for i in range(0, len(frame), piece):
                ours.sendall(frame[i : i + piece])
                whole = reader.read()
        assert whole is not None
        found = wire.loads(whole)
        assert (found["numbers"].tolist(), found["text"]) == (list(range(37)), "x" * 100)

    @pytest.mark.parametrize("in_buffer", [False, True], ids=["pickle", "buffer"])
    def test_announces_more_than_it_sends(self, in_buffer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is announced gets no memory before it comes, beyond a little."""
        monkeypatch.setattr(wire, "_MOST", 1 << 40)
        size = 1 << 33
        head = struct.pack("!4sIQ", b"cncd", int(in_buffer), 1 if in_buffer else size)
        if in_buffer:
            head += struct.pack("!Q", size) + b"."
        with pair() as (ours, theirs):
            theirs.setblocking(False)
            ours.sendall(head + b"some")
            tracemalloc.start()
            try:
                assert FrameReader(theirs).read() is None
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert peak < 100 << 20

    def test_does_not_read_ahead(self) -> None:
        """What comes behind a frame stays in the socket: it may be someone else's."""
        with pair() as (ours, theirs):
            ours.sendall(frame_of("x") + b"tail")
            assert wire.receive(theirs, timeout=30) == "x"
            assert theirs.recv(10) == b"tail"

    def test_never_blocks(self) -> None:
        """On a socket that does not block, a reader without data says so."""
        with pair() as (_, theirs):
            theirs.setblocking(False)
            assert FrameReader(theirs).read() is None

    def test_frame_stays_pickled(self) -> None:
        """receive_frame unpickles nothing."""
        with pair() as (ours, theirs):
            ours.sendall(struct.pack("!4sIQ", b"cncd", 0, 3) + b"???")
            frame = wire.receive_frame(theirs, timeout=30)
            with pytest.raises(pickle.UnpicklingError):
                wire.loads(frame)
