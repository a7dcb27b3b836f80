"""The sample accelerator is one: its memory is its own, its streams run later, and a customer can install it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from environments import ROOT, Environment, made

from harness import profiles, results

PACKAGE = ROOT / "fixtures" / "vendors" / "sim"
PROFILE = ROOT / "fixtures" / "profiles" / "sim.toml"
DEFECTS = tomllib.loads((PACKAGE / "defects.toml").read_text())
ORDERED = """
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
"""


@dataclass(frozen=True)
class Sim:
    """The accelerator's package in an environment of its own."""

    environment: Environment

    def run(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Execute code in a process of that environment."""
        return self.environment.run("-c", textwrap.dedent(code), timeout=60, OMP_NUM_THREADS="1", **env)

    def prints(self, code: str, **env: str) -> list[str]:
        """The lines that code prints; it must end well."""
        done = self.run(code, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    def suites(self, *arguments: str, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
        """Run suites by its profile."""
        return self.environment.suites(PROFILE, *arguments, timeout=timeout, **env)


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Sim:
    """The package, built and installed as a vendor's customer does it."""
    return Sim(made(tmp_path_factory.mktemp("sim") / "environment", PACKAGE))


@pytest.mark.nightly
def test_host_cannot_read_its_memory(sim: Sim) -> None:
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


@pytest.mark.nightly
def test_streams_run_later(sim: Sim) -> None:
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


@pytest.mark.nightly
def test_memory_is_given_back(sim: Sim) -> None:
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


@pytest.mark.nightly
def test_several_devices(sim: Sim) -> None:
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


@pytest.mark.nightly
def test_trains(sim: Sim) -> None:
    """A model with convolution, normalisation, dropout and attention, under autocast, saved and loaded again."""
    found = sim.prints("""
        import io, torch
        from torch import nn
        torch.manual_seed(0)
        layers = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(24, 2)
        model = nn.Sequential(*layers)
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


@pytest.mark.nightly
def test_random_numbers(sim: Sim) -> None:
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


@pytest.mark.nightly
def test_suites(sim: Sim) -> None:
    """Collectives on its devices give the right answers, in the right order."""
    files = [f"suites/collectives/operations/test_{name}.py" for name in ("broadcast", "all_to_all")]
    done = sim.suites(*files, *OF_STREAMS)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.nightly
def test_warm_worlds_keep_their_devices(sim: Sim, tmp_path: Path) -> None:
    """A test gets the devices of a warm world that waits, though the first device is free by then."""
    file = tmp_path / "test_stays.py"
    file.write_text(
        textwrap.dedent(
            """
            import contextlib
            import pytest
            from harness.devices import inventory
            from harness.leases import Leases

            seen, others = [], contextlib.ExitStack()
            others.enter_context(Leases(inventory("sim", imports=["concord_sim"])).hold(1))

            @pytest.mark.parametrize("turn", [1, 2])
            @pytest.mark.world(1, warm=True)
            def test_stays(world, turn):
                seen.append((world.pids, world.run(lambda rank: str(rank.device))))
                others.close()
                assert seen[0] == seen[-1]
                assert seen[0][1] == ["sim:1"]
            """
        )
    )
    done = sim.suites(str(file), CONCORD_LEASES=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.nightly
def test_worlds_share_a_device(sim: Sim, tmp_path: Path) -> None:
    """As many worlds as ``--worlds-per-device`` says run at once on the one device, with a worker for each."""
    file = tmp_path / "test_shares.py"
    file.write_text(
        textwrap.dedent(
            """
            import os
            import time
            from pathlib import Path
            import pytest

            @pytest.mark.parametrize("turn", [0, 1])
            @pytest.mark.world(2)
            def test_shares(world, turn):
                assert os.environ["PYTEST_XDIST_WORKER_COUNT"] == "2"
                assert world.run(lambda rank: str(rank.device)) == ["sim:0", "sim:0"]
                here = Path(__file__).parent
                (here / f"there-{turn}").touch()
                deadline = time.monotonic() + 60
                while not (here / f"there-{1 - turn}").exists():
                    assert time.monotonic() < deadline, "the other test has no world while this one has its own"
                    time.sleep(0.01)
            """
        )
    )
    options = ["-n", "gpus", "--ranks-per-device", "2", "--worlds-per-device", "2"]
    done = sim.suites(str(file), *options, SIM_DEVICES="1", CONCORD_LEASES=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.nightly
def test_bound_device(sim: Sim, tmp_path: Path) -> None:
    """Its backend takes the device. It does not split, so torch then refuses meshes of several dimensions."""
    file, profile = tmp_path / "test_bound.py", tmp_path / "bound.toml"
    profile.write_text('name = "bound"\ninherits = "sim"\nbind_device = true\n')
    file.write_text(
        textwrap.dedent(
            """
            import pytest
            import torch
            import torch.distributed as dist
            from harness import spmd

            @spmd(2)
            def test_bound(rank):
                assert rank.group.bound_device_id == rank.device
                ones = torch.ones(1, device=rank.device)
                dist.all_reduce(ones)
                assert ones.item() == 2
                with pytest.raises(RuntimeError):
                    rank.mesh(1, 2)
            """
        )
    )
    done = sim.environment.suites(profile, str(file), timeout=300, CONCORD_LEASES=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]


CIRCLE = """
    import torch, torch.distributed as dist
    from harness import Pool, RanksFailed, WorldSpec

    def body(rank):
        side = dist.new_group([0, 1])
        tensor = torch.ones(2, device=rank.device)
        for group in (dist.group.WORLD, side)[:{used}]:
            dist.all_reduce(tensor, group=group)
        torch.accelerator.synchronize()
        dist.all_reduce(tensor, group=side if rank.index else dist.group.WORLD)
        tensor.tolist()

    pool = Pool()
    devices = ["sim:0", "sim:1"]
    spec = WorldSpec(2, backend="simccl", device="sim", imports=("concord_sim",), timeout=120.0)
    try:
        pool.acquire(spec, devices).run(body, timeout=120.0)
    except RanksFailed as e:
        print(e.headline)
        print(e.verdict, e.culprits, sorted(line.partition(" at ")[0] for end in e.ends for line in end.collectives))
    pool.close()
"""
"""Two ranks that wait for one another on two groups, of which the first ``used`` are connected."""


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("used", "waits", "culprit"),
    [
        (1, "rank 1 waits in all_reduce(float32[2]), collective 1 of group '1' [0, 1]", 0),
        (2, "rank 0 waits in all_reduce(float32[2]), collective 2 of the default group", 1),
    ],
)
def test_deadlock_is_proven(sim: Sim, tmp_path: Path, used: int, waits: str, culprit: int) -> None:
    """Two ranks that wait for one another on two groups are proven to be deadlocked, long before their timeout.

    A rank in a group that was not used yet connects it, and no recorder has the collective in which it waits.
    """
    script = tmp_path / "circle.py"  # the watchdog reads the call that a rank is in from the source
    script.write_text(textwrap.dedent(CIRCLE).replace("{used}", str(used)))
    done = sim.environment.run(str(script), timeout=180, PYTHONPATH=str(ROOT))
    headline, evidence = done.stdout.splitlines()
    assert headline.startswith(f"deadlock: {waits} at {script}:")
    ended = [f"all_reduce(float32[2]) #1 on group {group}: ended" for group in (0, 0, 1, 1)[: 2 * used]]
    waiting = ["all_reduce(float32[2]) #2 on group 0: NOT DONE", f"all_reduce(float32[2]) #{used} on group 1: NOT DONE"]
    assert evidence == f"hung ({culprit},) {sorted(ended + waiting)}"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_worlds_are_kept(sim: Sim) -> None:
    """Tests share a warm world, though its ranks connect with the first collective; fresh worlds are not shared."""
    script = ROOT / "tests" / "bench" / "warm_worlds.py"
    how = ("--backend", "simccl", "--device", "sim", "--import", "concord_sim", "--tests", "5", "--rounds", "1")
    done = sim.environment.run(str(script), *how, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [found[kind][0][0] for kind in ("warm", "fresh")] == [1, 5]


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_programs_share_a_world(sim: Sim, tmp_path: Path) -> None:
    """Programs with equal meshes run in one world: nothing is cached of groups that are gone, in no thread."""
    env = {"CONCORD_LEASES": str(tmp_path), "CONCORD_EXAMPLES": "smoke"}
    done = sim.suites("suites/tp_extension/test_laws.py", "-k", "permuted or rewrapped", timeout=380, **env)
    assert done.returncode == 0, done.stdout[-3000:]


JUDGED = [
    f"suites/collectives/operations/test_{n}.py"
    for n in ("all_reduce", "all_to_all", "broadcast", "reduce_scatter", "barriers")
]
"""Files in which a defect must show, unless it is one of streams."""
OF_STREAMS = [f"suites/{folder}/test_streams.py" for folder in ("collectives/in_flight", "replicate", "replicate_fsdp")]


@pytest.mark.nightly
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", list(DEFECTS))
def test_defects_are_noticed(sim: Sim, tmp_path: Path, name: str) -> None:
    """The imperfect one gets bad verdicts where its defect is, and nowhere else."""
    files = OF_STREAMS if DEFECTS[name].get("streams") else JUDGED
    options = ["--world-timeout", "20", "--concord-results", str(tmp_path)]
    done = sim.suites(*files, *options, timeout=900, SIM_DEFECTS=name)
    (found,) = tmp_path.glob("*/results.jsonl")
    verdicts = {nodeid: test.verdict for nodeid, test in results.read(found).tests.items()}
    globs = [profiles.pattern(glob) for glob in DEFECTS[name]["tests"]]
    due = {test: DEFECTS[name]["verdict"] for test in verdicts if any(glob.match(test) for glob in globs)}
    assert due
    assert due == {test: said for test, said in verdicts.items() if said in results.BAD}, done.stdout[-2000:]


@pytest.mark.nightly
@pytest.mark.parametrize("script", sorted((ROOT / "docs" / "findings").glob("accelerator_*.py")), ids=lambda s: s.stem)
def test_what_torch_gets_wrong(sim: Sim, script: Path) -> None:
    """The scripts of what is waived there as PyTorch's say so."""
    (count,) = re.findall(r"--nproc-per-node=(\d+)", script.read_text())
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
    done = sim.environment.run(*torchrun, str(script), timeout=120, OMP_NUM_THREADS="1")
    assert done.returncode == 1, done.stderr
    assert "expected " in done.stdout


@pytest.mark.nightly
def test_events_that_do_not_wait(sim: Sim) -> None:
    """Streams are out of order with that defect, and in order without."""
    assert sim.prints(ORDERED) == ["[20.0, 20.0]"]
    assert sim.prints(ORDERED, SIM_DEFECTS="events-do-not-wait") == ["[11.0, 11.0]"]


@pytest.mark.nightly
def test_copies_that_do_not_wait(sim: Sim) -> None:
    """With that defect the host sees what a stream has not done yet."""
    code = """
        import torch
        tensor = torch.zeros(1, device="sim")
        torch.sim.synchronize()
        torch.sim._sleep(0.3)
        tensor.add_(1)
        print(tensor.cpu().item())
    """
    assert sim.prints(code) == ["1.0"]
    assert sim.prints(code, SIM_DEFECTS="copy-to-host-too-early") == ["0.0"]
