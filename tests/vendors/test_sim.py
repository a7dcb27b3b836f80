"""The sample accelerator is one: its memory is its own, its streams run later, and a customer can install it."""

from __future__ import annotations

import signal
import tomllib

import pytest

from harness import profiles
from tests.vendors.environments import PACKAGE, Installed

pytestmark = pytest.mark.nightly  # building a C++ extension takes more than a minute


def test_host_cannot_read_its_memory(sim: Installed) -> None:
    """Code of the host that follows a device's pointer dies of it."""
    done = sim.run("""
        import ctypes, torch
        tensor = torch.full((4,), 7.0, device="sim")
        torch.sim.synchronize()
        print(tensor.tolist(), flush=True)
        ctypes.string_at(tensor.data_ptr(), 16)
        print("read")
    """)
    assert done.stdout == "[7.0, 7.0, 7.0, 7.0]\n"
    assert done.returncode == -signal.SIGSEGV


def test_streams_run_later(sim: Installed) -> None:
    """The host goes on while a stream works; an event tells when it is done, and how long it took."""
    found = sim.prints("""
        import torch
        tensor, stream = torch.zeros(4, device="sim"), torch.sim.Stream()
        torch.sim.synchronize()
        begin, end = torch.sim.Event(enable_timing=True), torch.sim.Event(enable_timing=True)
        with torch.sim.stream(stream):
            begin.record()
            torch.sim._sleep(0.5)
            tensor.add_(1)
            end.record()
        print(end.query(), stream.query())
        end.synchronize()
        print(end.query(), begin.elapsed_time(end) >= 500, tensor.tolist())
    """)
    assert found == ["False False", "True True [1.0, 1.0, 1.0, 1.0]"]


def test_events_order_streams(sim: Installed) -> None:
    """What a stream does after an event comes after what the event was recorded behind."""
    found = sim.prints("""
        import torch
        tensor, first, second = torch.ones(2, device="sim"), torch.sim.Stream(), torch.sim.Stream()
        torch.sim.synchronize()
        with torch.sim.stream(first):
            torch.sim._sleep(0.3)
            tensor.add_(1)
            event = first.record_event()
        with torch.sim.stream(second):
            second.wait_event(event)
            tensor.mul_(10)
        torch.sim.synchronize()
        print(tensor.tolist())
    """)
    assert found == ["[20.0, 20.0]"]


def test_memory_is_given_back(sim: Installed) -> None:
    """What no tensor uses is not allocated, and after empty_cache not reserved; too much is refused."""
    found = sim.prints(
        """
        import torch
        tensor = torch.ones(1 << 20, device="sim")
        print(torch.sim.memory_allocated(), torch.accelerator.memory_allocated())
        del tensor
        print(torch.sim.memory_allocated(), torch.sim.memory_reserved())
        torch.sim.empty_cache()
        print(torch.sim.memory_allocated(), torch.sim.memory_reserved(), torch.sim.max_memory_allocated())
        try:
            torch.empty(1 << 30, device="sim")
        except torch.OutOfMemoryError as e:
            print("refused")
        """,
        SIM_MEMORY_MB="64",
    )
    assert found == ["4194304 4194304", "0 4194304", "0 0 4194304", "refused"]


def test_several_devices(sim: Installed) -> None:
    """As many as there are, less what the mask hides; each thread has one; tensors of two do not mix."""
    found = sim.prints(
        """
        import torch
        print(torch.accelerator.current_accelerator(), torch.accelerator.device_count(), torch.sim.is_initialized())
        torch.sim.set_device(2)
        here, there = torch.ones(2, device="sim"), torch.ones(2, device="sim:1")
        print(here.device, (here + there.to("sim:2")).tolist())
        for wrong in (lambda: here + there, lambda: here + torch.ones(2), lambda: torch.ones(1, device="sim:3")):
            try:
                wrong()
            except RuntimeError as e:
                print("refused")
        """,
        SIM_DEVICES="6",
        SIM_VISIBLE_DEVICES="5,0,1",
    )
    assert found == ["sim 3 False", "sim:2 [2.0, 2.0]", "refused", "refused", "refused"]


def test_trains(sim: Installed) -> None:
    """A model with convolution, normalisation, dropout and attention, under autocast, saved and loaded again."""
    found = sim.prints("""
        import io, torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(24, 2))
        model.sim()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        x, y = torch.randn(8, 2, 8, device="sim"), torch.arange(8, device="sim") % 2
        for _ in range(60):
            optimizer.zero_grad()
            with torch.autocast("sim", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        state = torch.load(file)
        print(loss.item() < 0.1, {t.device.type for t in state.values()})
    """)
    assert found == ["True {'sim'}"]


def test_random_numbers(sim: Installed) -> None:
    """A seed and an offset say what comes; the host's generator is not touched."""
    found = sim.prints("""
        import torch
        torch.manual_seed(3)
        host = torch.get_rng_state()
        first, state = torch.rand(5, device="sim"), torch.sim.get_rng_state()
        second = torch.nn.functional.dropout(torch.ones(64, device="sim"))
        torch.sim.set_rng_state(state)
        print(torch.equal(second, torch.nn.functional.dropout(torch.ones(64, device="sim"))))
        torch.manual_seed(3)
        print(torch.equal(first, torch.rand(5, device="sim")), torch.equal(host, torch.get_rng_state()))
    """)
    assert found == ["True", "True True"]


def test_profile_can_be_read() -> None:
    """The profile that the package brings has no mistake."""
    profile = profiles.read(PACKAGE / "sim.toml")
    assert (profile.backend, profile.device, profile.imports) == ("simccl", "sim", ("concord_sim",))


def test_suites(sim: Installed) -> None:
    """Collectives on its devices give the right answers."""
    done = sim.suites("suites/collectives/test_broadcast.py", "suites/collectives/test_all_to_all.py")
    assert done.returncode == 0, done.stdout[-3000:]


def test_defects_are_noticed(sim: Installed) -> None:
    """The imperfect one gets bad verdicts where its defects are, and nowhere else."""
    defects = tomllib.loads((PACKAGE / "defects.toml").read_text())
    expected = {test: said["verdict"] for said in defects.values() for test in said.get("tests", ())}
    chosen = [
        f"suites/collectives/{name}" for name in ("test_all_reduce.py", "test_broadcast.py", "test_all_to_all.py")
    ]
    names = ",".join(name for name, said in defects.items() if "tests" in said)
    done = sim.suites(*chosen, "-rA", "--world-timeout", "20", timeout=290, SIM_DEFECTS=names)
    bad = {line.split(" - ")[0].split()[1] for line in done.stdout.split("\n") if line.startswith("FAILED ")}
    assert bad == set(expected)
