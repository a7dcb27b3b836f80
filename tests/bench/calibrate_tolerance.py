"""How often the bounded oracle is wrong about healthy runs, and how small an error it still sees: the figures of
docs/tolerances.md.

    python tests/bench/calibrate_tolerance.py false-alarms --programs 1000 --file alarms.jsonl
    python tests/bench/calibrate_tolerance.py detection --programs 200 --file detection.jsonl

Every program is a line of the file as soon as it is measured: what a killed run had measured is not measured again,
unless the code changed.  Needs no ranks: a run on N ranks is emulated in one process, in the dtype under test.  The
batch is split, each part's gradients are computed in the dtype, added up in the dtype in random order, and divided.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2]))

from harness.oracles import operators, rounding, tolerance
from harness.oracles.tolerance import Bounded

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEFAULTS = {  # of torch.testing.assert_close: rtol, atol
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float16: (1e-3, 1e-5),
}
ORACLES = ("bounded", "assert_close", "1e-5")

Gradients = list[torch.Tensor]
Fault = Callable[[int, list[Gradients]], None]
"""Changes the gradients, [rank][parameter], before they are added up; the first argument is the step."""


class Attention(nn.Module):
    """Self-attention, with its own softmax or with torch's function."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.fused = heads, fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v)
        else:
            y = ((q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


class RMSNorm(nn.RMSNorm):
    """With an epsilon of its own: by default it is the dtype's, so that float64 computes something else."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)


class Mean(nn.Module):
    """Over the positions of a sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=1)


@dataclass
class Program:
    """A training run, drawn from a seed."""

    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.world = draw.choice((1, 2, 2, 3, 4, 4, 8))
        self.steps = draw.choice((1, 1, 2, 3))
        rows = self.world * draw.choice((1, 2, 3)) + draw.choice((0, 0, 1))
        width, wide, out = draw.choice((2, 3, 4, 8, 16)), draw.choice((4, 8, 16, 32)), draw.choice((1, 3, 8))
        act = draw.choice((nn.GELU, nn.Tanh, nn.SiLU, nn.ReLU, nn.Sigmoid))
        norm = draw.choice((nn.LayerNorm, RMSNorm, nn.Identity))
        length = draw.choice((2, 3, 5))
        family = draw.choice(("mlp", "mlp", "conv", "attention", "embedding"))
        bias = draw.random() < 0.8
        self.batch_norm = norm is nn.Identity and family in ("mlp", "conv") and self.seed % 2 == 0
        """Each rank normalises its own rows, as without SyncBatchNorm: the truth is split as well, then."""
        if self.batch_norm:
            rows = max(rows, 2 * self.world)
        if family == "mlp":
            between = nn.BatchNorm1d(wide) if self.batch_norm else norm(wide)
            middle = [nn.Linear(width, wide, bias), between, act(), nn.Linear(wide, wide), act()]
            layers = [*middle, nn.Linear(wide, out, bias)]
            self.inputs = [torch.randn(rows, width, dtype=torch.float64) for _ in range(self.steps)]
        elif family == "conv":
            size = draw.choice((4, 5))
            layers = [nn.Conv2d(width, 4, 3, padding=1, bias=bias), act(), nn.Flatten()]
            layers += [norm(4 * size * size), nn.Linear(4 * size * size, out)]
            if self.batch_norm:
                layers.insert(1, nn.BatchNorm2d(4))
            self.inputs = [torch.randn(rows, width, size, size, dtype=torch.float64) for _ in range(self.steps)]
        elif family == "attention":
            width = max(4, width)
            layers = [Attention(width, 2 if width % 2 == 0 else 1, draw.random() < 0.5), norm(width), Mean()]
            layers += [nn.Linear(width, out)]
            self.inputs = [torch.randn(rows, length, width, dtype=torch.float64) for _ in range(self.steps)]
        else:
            layers = [nn.Embedding(7, wide), norm(wide), Mean(), act(), nn.Linear(wide, out)]
            self.inputs = [torch.randint(0, 7, (rows, length)) for _ in range(self.steps)]
        self.module = nn.Sequential(*layers).double()
        self.targets = [torch.randn(rows, out, dtype=torch.float64) for _ in range(self.steps)]
        # Of a single class the cross entropy is zero, and so is every gradient.
        self.loss = draw.choice(("mse", "weighted", "entropy" if out > 1 else "mse"))
        self.optimizer = draw.choice(("sgd", "momentum", "adamw", "adamw"))
        self.rate = draw.choice((0.1, 0.01, 1 / 16))
        self.clip = draw.choice((None, None, 0.1, 1.0))
        self.rounded = draw.random() < 0.5
        """Whether weights and data are numbers of the dtype under test to begin with."""

    def describe(self) -> str:
        what = ", ".join(type(m).__name__ for m in self.module)
        return f"{self.seed}: {what}; {self.loss}, {self.optimizer}, {self.steps} steps, world {self.world}"

    def truth(self, dtype: torch.dtype) -> Callable[[], dict[str, torch.Tensor]]:
        """The run alone in float64."""
        return lambda: self.run(torch.float64, dtype, self.world if self.batch_norm else 1, random.Random(0), None)

    def run(
        self, dtype: torch.dtype, of: torch.dtype, world: int, draw: random.Random, fault: Fault | None
    ) -> dict[str, torch.Tensor]:
        """Train in ``dtype`` on ``world`` emulated ranks; ``of``: the dtype under test."""

        def data(t: torch.Tensor) -> torch.Tensor:
            if not t.is_floating_point():
                return t
            return (t.to(of) if self.rounded else t).to(dtype)

        # Deep copies of what is no parameter set a storage, which the oracle does not follow.
        module = copy.deepcopy(self.module, {id(b): b.clone() for b in self.module.buffers()})
        with torch.no_grad():
            for t in (*module.parameters(), *module.buffers()):
                t.data = data(t.data)
        parameters = list(module.parameters())
        if self.optimizer == "adamw":
            # float16 has no 1e-8: it would divide zero by zero.
            eps = 1e-3 if of == torch.float16 else 1e-8
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=self.rate, eps=eps)
        else:
            momentum = 0.9 if self.optimizer == "momentum" else 0.0
            optimizer = torch.optim.SGD(parameters, lr=self.rate, momentum=momentum)
        found: dict[str, torch.Tensor] = {}
        for step in range(self.steps):
            parts, outputs = [], []
            share = self.targets[step].numel() / world
            for x, target in zip(
                self.inputs[step].tensor_split(world), self.targets[step].tensor_split(world), strict=True
            ):
                output = module(data(x))
                (self._sum(output, data(target)) / share).backward()
                outputs.append(output.detach())
                parts.append([p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters])
                optimizer.zero_grad()
            if fault is not None:
                fault(step, parts)
            found[f"{step} output"] = torch.cat(outputs)
            before = draw.random() < 0.3
            for i, p in enumerate(parameters):
                p.grad = all_reduced([grads[i] for grads in parts], before, draw)
                found[f"{step} gradient {i}"] = p.grad.clone()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(parameters, self.clip)
            optimizer.step()
            for i, p in enumerate(parameters):
                found[f"{step} parameter {i}"] = p.detach().clone()
                for name, state in optimizer.state[p].items():
                    if isinstance(state, torch.Tensor) and state.dim():
                        found[f"{step} {name} {i}"] = state.clone()
            found |= {f"{step} {name}": b.clone() for name, b in module.named_buffers() if b.is_floating_point()}
            optimizer.zero_grad()
        return found

    def _sum(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.loss == "mse":
            return functional.mse_loss(output, target, reduction="sum")
        if self.loss == "weighted":
            return (output * target).sum()
        return functional.cross_entropy(output, target.abs().argmax(dim=1), reduction="sum")


def all_reduced(parts: Gradients, before: bool, draw: random.Random) -> torch.Tensor:
    """The average of the ranks' gradients, in their dtype, as a ring or a tree might add them up."""
    world = len(parts)
    if world == 1:
        return parts[0]
    parts = [p / world if before else p for p in parts]
    while len(parts) > 1:
        parts.append(parts.pop(draw.randrange(len(parts))) + parts.pop(draw.randrange(len(parts))))
    return parts[0] if before else parts[0] / world


def verdicts(bounded: Bounded, found: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, list[str]]:
    """What each oracle says: the tensors that it calls wrong."""
    wrong: dict[str, list[str]] = {oracle: [] for oracle in ORACLES}
    rtol, atol = DEFAULTS[dtype]
    for name, tensor in found.items():
        truth, value = bounded.truth[name], tensor.double()
        if bounded.differs(name, tensor):
            wrong["bounded"].append(name)
        # assert_close's own formula, without its cost
        if not torch.allclose(value, truth.to(dtype).double(), rtol=rtol, atol=atol):
            wrong["assert_close"].append(name)
        if not torch.allclose(value, truth, rtol=1e-5, atol=1e-5):
            wrong["1e-5"].append(name)
    return wrong


def nearness(bounded: Bounded, found: dict[str, torch.Tensor]) -> float:
    """The largest error as a share of what is allowed."""
    worst = 0.0
    for name, tensor in found.items():
        share = (tensor.double() - bounded.truth[name]).abs() / bounded.tolerance[name]
        worst = max(worst, float(share.nan_to_num(nan=0.0).max())) if share.numel() else worst
    return worst


Record = dict[str, Any]


def false_alarms(program: Program, dtype: torch.dtype, repeats: int) -> Record:
    """Healthy runs: how many tensors each oracle calls wrong."""
    start = time.process_time()
    bounded = Bounded(program.truth(dtype), dtype, world=program.world, seed=program.seed)
    cost = time.process_time() - start
    alarms = dict.fromkeys(ORACLES, 0)
    near, count = 0.0, 0
    for repeat in range(repeats):
        found = program.run(dtype, dtype, program.world, random.Random(repeat), None)
        count += len(found)
        near = max(near, nearness(bounded, found))
        for oracle, names in verdicts(bounded, found, dtype).items():
            alarms[oracle] += len(names)
            if oracle == "bounded":
                for name in names:
                    print(f"{program.describe()}: {bounded.differs(name, found[name])}", flush=True)
    return {"count": count, "alarms": alarms, "loose": bounded.loose, "near": near, "cost": cost}


def table_of_false_alarms(records: Sequence[Record], dtypes: Sequence[torch.dtype]) -> Iterator[str]:
    yield f"{sum(r['count'] for r in records)} comparisons"
    yield "| dtype | programs | comparisons | bounded | assert_close | 1e-5 | loose | error/allowed: 99 %, most |"
    yield "|---|---|---|---|---|---|---|---|"
    for dtype in dtypes:
        mine = [r for r in records if r["dtype"] == short(dtype)]
        if not mine:
            continue
        n, shares = sum(r["count"] for r in mine), sorted(r["near"] for r in mine)
        alarms = [sum(r["alarms"][oracle] for r in mine) for oracle in ORACLES]
        yield (
            f"| {short(dtype)} | {len(mine)} | {n} | {' | '.join(f'{a} ({a / n:.2%})' for a in alarms)} "
            f"| {sum(r['loose'] for r in mine) / len(mine):.1%} "
            f"| {shares[int(0.99 * len(shares))]:.2f}, {shares[-1]:.2f} |"
        )
    cost = sorted(r["cost"] for r in records)
    yield (
        f"Bounded(): median {cost[len(cost) // 2] * 1e3:.0f} ms of CPU, 95 % {cost[int(0.95 * len(cost))] * 1e3:.0f} ms"
    )


def scaled(factor: float, at: int) -> Fault:
    """Every gradient of one step is ``factor`` times what it should be."""

    def fault(step: int, parts: list[Gradients]) -> None:
        if step == at:
            for grads in parts:
                grads[:] = [g * factor for g in grads]

    return fault


def detection(program: Program, dtype: torch.dtype, repeats: int) -> Record:
    """Broken runs: what each oracle catches; nothing is returned for a program that has nothing to get wrong."""
    if program.world == 1:
        return {}
    bounded = Bounded(program.truth(dtype), dtype, world=program.world, seed=program.seed)
    draw = random.Random(program.seed)
    at = draw.randrange(program.steps)
    if not any(bool(t.any()) for name, t in bounded.truth.items() if name.startswith(f"{at} gradient")):
        return {}
    healthy = verdicts(bounded, program.run(dtype, dtype, program.world, random.Random(1), None), dtype)

    def caught(fault: Fault) -> set[str]:
        found = program.run(dtype, dtype, program.world, random.Random(1), fault)
        # An oracle that is wrong about the healthy run has caught nothing: only what is new counts.
        return {o for o, names in verdicts(bounded, found, dtype).items() if set(names) - set(healthy[o])}

    scales = [2.0**-k for k in range(-1, 50)]
    least: dict[str, float] = {}
    seen: dict[int, set[str]] = {}
    for oracle in ORACLES:
        low, high = 0, len(scales)  # caught below low, missed from high on
        while low < high:
            middle = (low + high) // 2
            if middle not in seen:
                seen[middle] = caught(scaled(1 + scales[middle], at))
            low, high = (middle + 1, high) if oracle in seen[middle] else (low, middle)
        least[oracle] = scales[low - 1] if low else math.inf

    size = 0.0

    def lose(step: int, parts: list[Gradients]) -> None:
        nonlocal size
        there = [(grads, i) for grads in parts for i, g in enumerate(grads) if bool(g.any())]
        if step != at or not there:
            return
        grads, i = draw.choice(there)
        flat = grads[i].clone(memory_format=torch.contiguous_format).view(-1)
        j = draw.choice(flat.nonzero().reshape(-1).tolist())
        total = torch.stack([p[i].double() for p in parts]).sum(dim=0)
        size = abs(float(flat[j])) / max(float(total.square().mean().sqrt()), 1e-300)
        flat[j] = 0
        grads[i] = flat.view(grads[i].shape)

    def swap(step: int, parts: list[Gradients]) -> None:
        if step == at:
            a, b = draw.sample(range(len(parts)), 2)
            parts[a] = [g.clone() for g in parts[b]]

    lost, swapped = caught(lose), caught(swap)
    return {"steps": program.steps, "least": least, "size": size, "lost": sorted(lost), "swapped": sorted(swapped)}


def table_of_detection(records: Sequence[Record], dtypes: Sequence[torch.dtype]) -> Iterator[str]:
    bands = ((0.0, 0.1), (0.1, 0.5), (0.5, math.inf))
    yield (
        "| dtype (programs) | oracle | scale: half | scale: 95 % | lost | of size "
        + " | ".join(f"{low} to {high}" for low, high in bands)
        + " | 95 % from | wrong rank |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for dtype, most in itertools.product(dtypes, (math.inf, 1)):
        mine = [r for r in records if r["dtype"] == short(dtype) and r.get("steps", math.inf) <= most and "least" in r]
        n, of = len(mine), ", of one step" if most == 1 else ""
        for oracle in ORACLES if mine else ():
            sizes = sorted(r["least"][oracle] for r in mine)
            lost = [(r["size"], oracle in r["lost"]) for r in mine]
            yield (
                f"| {short(dtype)} ({n}{of}) | {oracle} | {sizes[n // 2]:.2g} | {sizes[math.ceil(0.95 * n) - 1]:.2g} "
                f"| {share([hit for _, hit in lost])} "
                f"| {' | '.join(share([hit for s, hit in lost if low <= s < high]) for low, high in bands)} "
                f"| {surely(lost):.2g} "
                f"| {sum(oracle in r['swapped'] for r in mine) / n:.1%} |"
            )


def share(hits: Sequence[bool]) -> str:
    return f"{sum(hits) / len(hits):.0%}" if hits else "-"


def surely(lost: Sequence[tuple[float, bool]]) -> float:
    """The smallest size from which on 95 % of lost elements are caught."""
    best, hits = math.inf, 0
    for n, (size, hit) in enumerate(sorted(lost, reverse=True), 1):
        hits += hit
        if hits >= 0.95 * n:
            best = size
    return best


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure_all(what: str, dtypes: Sequence[torch.dtype], seeds: range, repeats: int, file: Path | None) -> None:
    """A record of each program in each dtype, out of ``file`` where it has one of this very code."""
    sources = (tolerance.__file__, rounding.__file__, operators.__file__, __file__)
    code = hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()[:12]
    known: dict[tuple[Any, ...], Record] = {}
    if file is not None and file.exists():
        for line in file.read_text().splitlines():
            record = json.loads(line)
            known[tuple(record[key] for key in ("code", "what", "repeats", "dtype", "seed"))] = record
    measure, table = MEASURES[what]
    records: list[Record] = []
    for seed in seeds:
        for dtype in dtypes:
            key = (code, what, repeats, short(dtype), seed)
            record = known.get(key) or {
                **dict(zip(("code", "what", "repeats", "dtype", "seed"), key, strict=True)),
                **measure(Program(seed), dtype, repeats),
            }
            records.append(record)
            if file is not None and key not in known:
                with file.open("a") as lines:
                    lines.write(json.dumps(record) + "\n")
        if (seed - seeds.start + 1) % 100 == 0 or seed == seeds[-1]:
            print(f"after {seed - seeds.start + 1} programs:", *table(records, dtypes), sep="\n", flush=True)


MEASURES = {"false-alarms": (false_alarms, table_of_false_alarms), "detection": (detection, table_of_detection)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(MEASURES))
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--repeats", type=int, default=2, help="healthy runs of each program")
    parser.add_argument("--dtypes", nargs="+", default=[short(dtype) for dtype in DTYPES])
    parser.add_argument("--file", type=Path, help="where to keep what was measured, program by program")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure_all(
        options.what,
        [getattr(torch, name) for name in options.dtypes],
        range(options.first, options.first + options.programs),
        options.repeats,
        options.file,
    )
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch {torch.__version__}, load {load}")
