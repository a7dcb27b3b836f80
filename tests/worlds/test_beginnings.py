"""How ranks begin: forked from a server that no accelerator and no thread has spoiled, or as new Pythons."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Pool, Rank, WorldSpec
from harness.profiles.vocabulary import FORK, SPAWN, STARTS
from harness.worlds import runtimes, server, tables
from harness.worlds.launch import AUTOLOAD, LaunchError
from harness.worlds.local import LocalLauncher
from harness.worlds.preloading import PRELOAD
from tests.worlds.conftest import add_up

PACKAGE = "no_such_accelerator"


@pytest.fixture
def preloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], LocalLauncher]]:
    """Makes a launcher whose server imports torch and a module of this text."""
    launchers = []

    def make(text: str) -> LocalLauncher:
        (tmp_path / "preloaded_here.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        launchers.append(LocalLauncher(["torch", "preloaded_here"], start=FORK))  # its server imports something
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


def brings(folder: Path, text: str) -> None:
    """Make a package that extends torch by its entry point, in a folder of the import path."""
    (folder / f"{PACKAGE}.py").write_text(text)
    about = folder / f"{PACKAGE}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[torch.backends]\n{PACKAGE} = {PACKAGE}:autoload\n")


# the server


def test_server_has_used_no_runtime() -> None:
    """After all that it imports, a fork of the server could use every device that this torch was built for."""
    launcher = LocalLauncher()
    try:
        assert launcher.wait_ready()["unforkable"] == []
    finally:
        launcher.close()


def test_what_is_left_to_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Modules that can't be imported are named, but for those of the list that another PyTorch has."""
    (tmp_path / "of_another_torch").mkdir()
    (tmp_path / "of_another_torch" / "__init__.py").touch()
    (tmp_path / "needs_more.py").write_text("import no_such_module_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    listed = ["json", "of_another_torch.newer.module", "needs_more"]
    monkeypatch.setattr(server, "PRELOAD", tuple(listed))
    assert server._preload([*listed, "of_another_torch.asked_for"]) == [
        "needs_more: No module named 'no_such_module_at_all'",
        "of_another_torch.asked_for: No module named 'of_another_torch.asked_for'",
    ]


def test_runtime_that_an_import_asks_for(preloading: Callable[[str], LocalLauncher]) -> None:
    """A module that asks at import how many devices there are is answered, and the server has used no runtime."""
    text = "import torch\ncount = torch._C._cuda_getDeviceCount() if hasattr(torch._C, '_cuda_getDeviceCount') else 0\n"
    ready = preloading(text).wait_ready()
    assert ready["unforkable"] == []
    assert [line for line in ready["missing"] if "RuntimeTouched" in line or "_cuda_getDeviceCount" in line] == []


SPOILED = """
import os, torch
bad = [False]
torch.xpu._is_in_bad_fork = lambda: bad[0]
os.register_at_fork(after_in_child=lambda: bad.__setitem__(0, True))
"""


def test_runtime_that_was_used(preloading: Callable[[str], LocalLauncher]) -> None:
    """A server whose children can't use a device is refused, and torch's word for it is in the error."""
    with pytest.raises(LaunchError, match=r"runtime of an accelerator: torch\.xpu says .*--rank-start spawn"):
        preloading(SPOILED).wait_ready()


def test_device_file_that_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open device file and a loaded driver library are uses of a runtime."""
    device = tmp_path / "davinci0"
    device.touch()
    monkeypatch.setattr(runtimes, "_DEVICE_FILES", (str(tmp_path / "davinci*"),))
    assert f"{device} is open" not in runtimes.touched()
    with device.open():
        assert f"{device} is open" in runtimes.touched()


class Driver:
    """Stands for a runtime in ``torch._C``: notes in which processes it was asked how many devices there are."""

    def __init__(self, log: Path, answer: Callable[[], int]) -> None:
        self.log, self.answer = log, answer

    def _made_up_getDeviceCount(self) -> int:  # noqa: N802  # as in torch._C
        with self.log.open("a") as log:
            log.write(f"{os.getpid()}\n")
        return self.answer()

    def asked_in(self) -> list[int]:
        """The processes."""
        return [int(line) for line in self.log.read_text().split()]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Driver]:
    """Give torch a runtime whose devices the kernel shows."""

    def make(answer: Callable[[], int], files: tuple[str, ...] = ("/dev/null",)) -> Driver:
        made = Driver(tmp_path / "asked", answer)
        made.log.touch()
        monkeypatch.setattr(runtimes, "_DEVICE_FILES", files)
        monkeypatch.setattr(runtimes, "_COUNT", re.compile("_(made_up)_getDeviceCount"))
        monkeypatch.setattr(torch._C, "_made_up_getDeviceCount", made._made_up_getDeviceCount, raising=False)
        monkeypatch.setattr(torch._C, "_made_up_init", lambda: None, raising=False)
        return made

    return make


def test_a_child_asks(driver: Callable[..., Driver]) -> None:
    """Another process asks the runtime, once; starting it is refused; then all is as before."""
    there = driver(lambda: 3)
    before: Any = torch._C._made_up_getDeviceCount, torch._C._made_up_init
    with runtimes.out_of_reach():
        assert [torch._C._made_up_getDeviceCount() for _ in range(2)] == [3, 3]
        with pytest.raises(runtimes.RuntimeTouched, match=r"it calls torch\._C\._made_up_init"):
            torch._C._made_up_init()
    assert len(there.asked_in()) == 1
    assert os.getpid() not in there.asked_in()
    assert (torch._C._made_up_getDeviceCount, torch._C._made_up_init) == before


def test_a_child_that_ends(driver: Callable[..., Driver]) -> None:
    """A runtime that ends the process that asks, or raises, is an error of the import."""
    driver(lambda: os._exit(1))
    with runtimes.out_of_reach(), pytest.raises(runtimes.RuntimeTouched, match="made_up_getDeviceCount, which fails"):
        torch._C._made_up_getDeviceCount()


def test_no_device_to_ask(driver: Callable[..., Driver]) -> None:
    """Where the kernel shows no accelerator, there is none, and nobody is asked."""
    there = driver(lambda: 3, files=())
    with runtimes.out_of_reach():
        assert torch._C._made_up_getDeviceCount() == 0
    assert there.asked_in() == []


@pytest.mark.skipif(not hasattr(torch._C, "_cuda_getDeviceCount"), reason="this torch was built without CUDA")
def test_management_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's management library is not asked, even if the caller's environment tells torch to."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: pytest.fail("it was asked"))
    with runtimes.out_of_reach():
        torch.cuda.is_available()
        torch.cuda.device_count()


THREAD = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True, name='ticker').start()\n"
)


LOOKED_UP = """
import torch.distributed as dist

def ensure(name):
    with open({file!r}, "a") as told:
        told.write(name)
    raise RuntimeError("a broken package")

dist.Backend._ensure_backend_registered = ensure
"""


def test_backend_is_found_before_ranks(preloading: Callable[[str], LocalLauncher], tmp_path: Path) -> None:
    """The server has torch look for its backend, once, and ranks meet what goes wrong with that."""
    ready = preloading(LOOKED_UP.format(file=str(tmp_path / "told"))).wait_ready()
    assert (tmp_path / "told").read_text() == "gloo"
    assert ready["missing"] == []


def test_server_with_a_thread(preloading: Callable[[str], LocalLauncher]) -> None:
    """A server with a thread beside its own is refused, with the thread's name."""
    with pytest.raises(LaunchError, match="can't be forked: it has 1 thread beside its own: 'ticker'"):
        preloading(THREAD).wait_ready()


def test_thread_of_another_language() -> None:
    """A thread that Python does not know has the kernel's name."""
    assert runtimes.other_threads() == sorted(runtimes.other_threads())
    started, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (started.set(), ended.wait()), name="one of ours")
    thread.start()
    started.wait()
    try:
        assert "one of ours" in runtimes.other_threads()
    finally:
        ended.set()
        thread.join()


# packages that extend torch


def test_package_that_extends_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    """The server does not import it, so that its threads spoil nothing; on the host ranks do not, either."""
    brings(tmp_path, f"{THREAD}def autoload(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    world = pool.acquire(WorldSpec(1, "gloo"))
    assert world.run(lambda rank: (PACKAGE in sys.modules, os.environ.get(AUTOLOAD))) == [(False, None)]
    pool.release(world)


def test_package_that_extends_torch_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    """Ranks on a device import it before anything that the profile names, unless the user has turned that off."""
    brings(tmp_path, "import torch\ndef autoload():\n    torch.extended = True\n")
    (tmp_path / "profile_imports.py").write_text("import torch\nextended = hasattr(torch, 'extended')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def loaded(rank: Rank) -> Any:
        import profile_imports

        return profile_imports.extended

    def on_a_device() -> Any:
        world = pool.acquire(WorldSpec(1, "gloo", imports=("profile_imports",)), devices=("meta",))
        try:
            return world.run(loaded)
        finally:
            pool.release(world)

    assert on_a_device() == [True]
    monkeypatch.setenv(AUTOLOAD, "0")
    assert on_a_device() == [False]


def test_package_that_can_not_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    """The error names the package, and how to leave it out."""
    brings(tmp_path, "def autoload():\n    raise OSError('no driver')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Exception, match=f"'{PACKAGE}'.*OSError: no driver; {AUTOLOAD}=0 leaves it out"):
        pool.acquire(WorldSpec(1, "gloo"), devices=("meta",))


@pytest.mark.parametrize(
    ("device", "bind", "expected"),
    [("cuda:1", True, "cuda:1"), ("cuda:1", False, None), ("cpu", True, None)],
    ids=["bound", "not asked for", "host"],
)
def test_device_is_bound(pool: Pool, device: str, bind: bool, expected: str | None) -> None:
    """Ranks give init_process_group their device if the world says so and they are on an accelerator."""

    def join(rank: Rank) -> str | None:
        """Join once more, in this rank's process, with everything replaced that needs a device or a group."""
        from harness.worlds.rank import RankSetup, _RankProcess

        given: dict[str, Any] = {}
        torch.accelerator.set_device_index = lambda index: None
        dist.TCPStore = lambda *args, **options: None  # type: ignore[attr-defined]
        dist.init_process_group = lambda backend, **options: given.update(options)
        setup = RankSetup(1, 2, "any", device, ("", 0), 60.0, bind_device=bind)
        nothing: Any = None
        _RankProcess(setup, nothing, nothing, nothing).join(None)
        return str(given["device_id"]) if given["device_id"] is not None else None

    world = pool.acquire(WorldSpec(1, "gloo"))
    assert world.run(join) == [expected]
    world.kill()


# both ways


@pytest.mark.parametrize("start", STARTS)
def test_both_ways(pool: Pool, start: str) -> None:
    """Ranks work the same; only forked ones find torch's lazy parts imported, and its tables made."""
    world = pool.acquire(WorldSpec(2, "gloo", start=start))
    assert world.run(add_up) == [3.0, 3.0]

    def preloaded(rank: Rank) -> tuple[bool, bool, int]:
        names = sys.modules.get("torch._dynamo.funcname_cache")
        made = names is not None and any("functional_collectives" in file for file in names.cache)
        return "torch._inductor.compile_fx" in sys.modules, made, dist.get_world_size()

    assert world.run(preloaded) == [(start == FORK, start == FORK, 2)] * 2
    pool.release(world)


def test_spawned_rank_reads_its_environment_first(pool: Pool) -> None:
    """A variable that torch reads at import can be given to spawned ranks."""
    world = pool.acquire(WorldSpec(1, "gloo", start=SPAWN, env=(("OMP_NUM_THREADS", "2"), (AUTOLOAD, "0"))))
    assert world.run(lambda rank: (torch.get_num_threads(), os.environ[AUTOLOAD])) == [(2, "0")]
    pool.release(world)


def test_bad_start() -> None:
    with pytest.raises(ValueError, match="start of ranks: fork or spawn, not 'thread'"):
        WorldSpec(1, "gloo", start="thread")


def compiled(rank: Rank, backend: str) -> float:
    """Compile a function of a tensor, with as many elements as there are ranks."""
    return float(torch.compile(lambda x: x.cos() + 1, backend=backend)(torch.zeros(dist.get_world_size())).sum())


def test_tables_of_inductor(pool: Pool) -> None:
    """They are made after a rank has used Inductor, one at a fork, and not before; results are the same."""

    def made(rank: Rank) -> list[int]:
        import torch._inductor.fx_passes.joint_graph as joint
        import torch._inductor.fx_passes.post_grad as post

        return [each.lazy_init.cache_info().currsize for each in (post, joint)]

    found = []
    for backend in ("", "aot_eager", "inductor", ""):
        world = pool.acquire(WorldSpec(2, "gloo"))
        found += [(backend, world.run(made))]
        if backend:
            assert world.run(compiled, backend, timeout=200) == [4.0, 4.0]
        pool.release(world)
    no, yes = [0, 0], [int(not runtimes.shown())] * 2
    before = [(backend, [no, no]) for backend in ("", "aot_eager", "inductor")]
    assert found[:3] == before
    world = pool.acquire(WorldSpec(2, "gloo"))
    assert world.run(made) == [yes, yes]
    assert world.run(compiled, "inductor", timeout=200) == [4.0, 4.0]
    pool.release(world)


def test_instructions_are_tried_once(pool: Pool) -> None:
    """A later rank has the answers of an earlier one, and finds the same instructions."""

    def tried(rank: Rank) -> tuple[int, list[str]]:
        import subprocess

        import torch._inductor.cpu_vec_isa as instructions

        calls: list[object] = []
        for name in ("run", "check_call"):
            real = getattr(subprocess, name)
            setattr(subprocess, name, lambda *a, real=real, **k: (calls.append(a), real(*a, **k))[1])
        return len(calls), [str(each) for each in instructions.valid_vec_isa_list()] + [str(len(calls))]

    one, other = pool.acquire(WorldSpec(1)), None
    ((_, first),) = one.run(tried, timeout=200)
    pool.release(one)
    other = pool.acquire(WorldSpec(1))
    ((_, second),) = other.run(tried, timeout=200)
    pool.release(other)
    assert first[:-1] == second[:-1]
    assert second[-1] == "0"


def test_answers_are_shared() -> None:
    """An answer is found once, by a child or by its parent; a slot that holds another answer is none."""
    answers = tables.SharedAnswers()
    assert not answers
    child = os.fork()
    if child == 0:
        answers.answer("is it?", lambda: True)
        os._exit(0)
    os.waitpid(child, 0)
    assert answers
    assert answers.answer("is it?", lambda: pytest.fail("asked again"))
    assert not answers.answer("is that?", lambda: False)
    assert not answers.answer("is that?", lambda: pytest.fail("asked again"))
    for number in range(1000):
        assert answers.answer(f"{number}", lambda number=number: number % 3 == 0) == (number % 3 == 0)
        assert answers.answer(f"{number}", lambda: pytest.fail("asked again")) == (number % 3 == 0)


def test_latency_of_guards_is_not_measured(pool: Pool) -> None:
    """Dynamo tells a latency of 0 for guards in a rank, and guards are checked all the same."""
    world = pool.acquire(WorldSpec(2, "gloo"))

    def guarded(rank: Rank) -> tuple[float, int]:
        import torch._dynamo.guards as guards

        torch._dynamo.reset()
        graphs: list[object] = []
        function = torch.compile(lambda x, n: x + n, backend=lambda g, _: graphs.append(g) or g.forward, dynamic=False)
        for n in (1, 1, 2):
            function(torch.ones(2), n)
        return guards.profile_guard_manager(None, {}, 1), len(graphs)

    assert world.run(guarded) == [(0.0, 2)] * 2
    pool.release(world)


def test_no_tables_without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was asked for torch alone does not import Dynamo for its tables."""
    monkeypatch.setattr("harness.worlds.tables.importlib.import_module", lambda name: pytest.fail(name))
    tables.fill(["torch", "torch.distributed"])


def test_tables_that_torch_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another PyTorch may not have them: then ranks only start slower."""

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("harness.worlds.tables.importlib.import_module", missing)
    tables.fill(["torch", "torch._dynamo"])


def test_preload_names_torch_first() -> None:
    """The guard is in place before any of torch's parts is imported."""
    assert PRELOAD[0] == "torch"
