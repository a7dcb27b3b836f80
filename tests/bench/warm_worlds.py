"""How many worlds a row of tests takes and how long, warm and fresh in turns: ``python tests/bench/warm_worlds.py``.

It needs nothing of pytest, so it also runs where a vendor's package is installed.  The last line is JSON: for warm and
fresh worlds, the number of worlds and seconds of each round, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from harness import Pool, Rank, WorldSpec


def body(rank: Rank) -> None:
    """A small test: one collective of each kind."""
    tensor = torch.ones(rank.size, device=rank.device)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.all_to_all_single(torch.empty_like(tensor), tensor)
    dist.barrier()
    assert tensor.tolist() == [float(rank.size)] * rank.size


def row(pool: Pool, spec: WorldSpec, devices: list[str], tests: int) -> tuple[int, float]:
    """Return how many worlds a number of tests took, and how many seconds."""
    began, worlds = time.monotonic(), set()
    for _ in range(tests):
        world = pool.acquire(spec, devices)
        world.run(body)
        worlds.add(tuple(world.pids))
        pool.release(world, devices)
    return len(worlds), time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--import", dest="imports", nargs="*", default=[])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tests", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    on_host = asked.device == "cpu"
    devices = [] if on_host else [f"{asked.device}:{i}" for i in range(asked.ranks)]
    rounds: dict[str, list[tuple[int, float]]] = {"warm": [], "fresh": []}
    for _ in range(asked.rounds):
        for kind, found in rounds.items():
            pool = Pool()
            spec = WorldSpec(
                asked.ranks,
                backend=asked.backend,
                device=asked.device,
                imports=tuple(asked.imports),
                env=(("TORCH_GLOO_LAZY_INIT", "1"),) if on_host else (),
                warm=kind == "warm",
            )
            pool.launcher(private=on_host).wait_ready()  # type: ignore[attr-defined]  # the server's start is no test's
            found.append(row(pool, spec, devices, asked.tests))
            pool.close()
    seconds = {kind: median(seconds for _, seconds in found) for kind, found in rounds.items()}
    print(json.dumps({**rounds, "ratio": seconds["warm"] / seconds["fresh"]}))


if __name__ == "__main__":
    main()
