"""How often the bounded oracle is wrong about healthy runs, and how small an error it still sees: the figures of
docs/tolerances.md.

    python tests/bench/calibrate_tolerance.py false-alarms --programs 1000
    python tests/bench/calibrate_tolerance.py detection --programs 200

Needs no ranks: a run on N ranks is emulated in one process, in the dtype under test.  The batch is split, each part's
gradients are computed in the dtype, added up in the dtype in random order, and divided.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2]))

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
        if family == "mlp":
            middle = [nn.Linear(width, wide, bias), norm(wide), act(), nn.Linear(wide, wide), act()]
            layers = [*middle, nn.Linear(wide, out, bias)]
            self.inputs = [torch.randn(rows, width, dtype=torch.float64) for _ in range(self.steps)]
        elif family == "conv":
            size = draw.choice((4, 5))
            layers = [nn.Conv2d(width, 4, 3, padding=1, bias=bias), act(), nn.Flatten()]
            layers += [norm(4 * size * size), nn.Linear(4 * size * size, out)]
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
        return lambda: self.run(torch.float64, dtype, 1, random.Random(0), None)

    def run(
        self, dtype: torch.dtype, of: torch.dtype, world: int, draw: random.Random, fault: Fault | None
    ) -> dict[str, torch.Tensor]:
        """Train in ``dtype`` on ``world`` emulated ranks; ``of``: the dtype under test."""

        def data(t: torch.Tensor) -> torch.Tensor:
            if not t.is_floating_point():
                return t
            return (t.to(of) if self.rounded else t).to(dtype)

        module = copy.deepcopy(self.module)
        with torch.no_grad():
            for p in module.parameters():
                p.data = data(p.data)
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


def false_alarms(dtypes: Sequence[torch.dtype], programs: int, first: int, repeats: int) -> None:
    """Healthy runs: how many tensors each oracle calls wrong."""
    count = dict.fromkeys(dtypes, 0)
    alarms = {(dtype, oracle): 0 for dtype in dtypes for oracle in ORACLES}
    loose: dict[torch.dtype, list[float]] = {dtype: [] for dtype in dtypes}
    near: dict[torch.dtype, list[float]] = {dtype: [] for dtype in dtypes}
    cost: list[float] = []
    for seed in range(first, first + programs):
        program = Program(seed)
        for dtype in dtypes:
            start = time.process_time()
            bounded = Bounded(program.truth(dtype), dtype, world=program.world, seed=seed)
            cost.append(time.process_time() - start)
            loose[dtype].append(bounded.loose)
            for repeat in range(repeats):
                found = program.run(dtype, dtype, program.world, random.Random(repeat), None)
                count[dtype] += len(found)
                near[dtype].append(nearness(bounded, found))
                for oracle, names in verdicts(bounded, found, dtype).items():
                    alarms[dtype, oracle] += len(names)
                    if oracle == "bounded":
                        for name in names:
                            print(f"{program.describe()}: {bounded.differs(name, found[name])}", flush=True)
        if (seed - first + 1) % 100 == 0 or seed == first + programs - 1:
            print(f"after {seed - first + 1} programs, {sum(count.values())} comparisons:")
            print(
                "| dtype | comparisons | bounded | assert_close | rtol=atol=1e-5 | loose | error/allowed: 99 %, most |"
            )
            print("|---|---|---|---|---|---|---|")
            for dtype in dtypes:
                n, shares = count[dtype], sorted(near[dtype])
                rates = [f"{alarms[dtype, o]} ({alarms[dtype, o] / n:.2%})" for o in ORACLES]
                print(
                    f"| {str(dtype)[6:]} | {n} | {' | '.join(rates)} | {sum(loose[dtype]) / len(loose[dtype]):.1%} "
                    f"| {shares[int(0.99 * len(shares))]:.2f}, {shares[-1]:.2f} |"
                )
            cost.sort()
            print(
                f"Bounded(): median {cost[len(cost) // 2] * 1e3:.0f} ms of CPU, "
                f"95 % {cost[int(0.95 * len(cost))] * 1e3:.0f} ms",
                flush=True,
            )


def scaled(factor: float, at: int) -> Fault:
    """Every gradient of one step is ``factor`` times what it should be."""

    def fault(step: int, parts: list[Gradients]) -> None:
        if step == at:
            for grads in parts:
                grads[:] = [g * factor for g in grads]

    return fault


def detection(dtypes: Sequence[torch.dtype], programs: int, first: int) -> None:
    """Broken runs: what each oracle catches."""
    scales = [2.0**-k for k in range(-1, 50)]
    for dtype in dtypes:
        least = {oracle: [] for oracle in ORACLES}  # type: dict[str, list[float]]
        lost = {oracle: [] for oracle in ORACLES}  # type: dict[str, list[tuple[float, bool]]]
        swapped = {oracle: [] for oracle in ORACLES}  # type: dict[str, list[bool]]
        for seed in range(first, first + programs):
            program = Program(seed)
            if program.world == 1:
                continue
            bounded = Bounded(program.truth(dtype), dtype, world=program.world, seed=seed)
            draw = random.Random(seed)
            at = draw.randrange(program.steps)
            if not any(bool(t.any()) for name, t in bounded.truth.items() if name.startswith(f"{at} gradient")):
                continue  # nothing to get wrong
            healthy = verdicts(bounded, program.run(dtype, dtype, program.world, random.Random(1), None), dtype)

            def caught(fault: Fault) -> Iterator[str]:
                found = program.run(dtype, dtype, program.world, random.Random(1), fault)  # noqa: B023
                for oracle, names in verdicts(bounded, found, dtype).items():  # noqa: B023
                    # An oracle that is wrong about the healthy run has caught nothing: only what is new counts.
                    if set(names) - set(healthy[oracle]):  # noqa: B023
                        yield oracle

            seen: dict[int, set[str]] = {}
            for oracle in ORACLES:
                low, high = 0, len(scales)  # caught below low, missed from high on
                while low < high:
                    middle = (low + high) // 2
                    if middle not in seen:
                        seen[middle] = set(caught(scaled(1 + scales[middle], at)))
                    low, high = (middle + 1, high) if oracle in seen[middle] else (low, middle)
                least[oracle].append(scales[low - 1] if low else math.inf)

            size = [0.0]

            def lose(step: int, parts: list[Gradients]) -> None:
                if step != at:  # noqa: B023
                    return
                there = [(grads, i) for grads in parts for i, g in enumerate(grads) if bool(g.any())]
                if not there:
                    return
                grads, i = draw.choice(there)  # noqa: B023
                flat = grads[i].clone(memory_format=torch.contiguous_format).view(-1)
                j = draw.choice(flat.nonzero().reshape(-1).tolist())  # noqa: B023
                total = torch.stack([p[i].double() for p in parts]).sum(dim=0)
                size[0] = abs(float(flat[j])) / max(float(total.square().mean().sqrt()), 1e-300)  # noqa: B023
                flat[j] = 0
                grads[i] = flat.view(grads[i].shape)

            names = set(caught(lose))
            for oracle in ORACLES:
                lost[oracle].append((size[0], oracle in names))

            def swap(step: int, parts: list[Gradients]) -> None:
                if step == at:  # noqa: B023
                    a, b = draw.sample(range(len(parts)), 2)  # noqa: B023
                    parts[a] = [g.clone() for g in parts[b]]

            names = set(caught(swap))
            for oracle in ORACLES:
                swapped[oracle].append(oracle in names)
        print(f"{str(dtype)[6:]}: {len(least['bounded'])} programs on more than one rank", flush=True)
        for oracle in ORACLES:
            sizes = sorted(least[oracle])
            n = len(sizes)
            hits = sum(hit for _, hit in lost[oracle])
            print(
                f"| {str(dtype)[6:]} | {oracle} | {sizes[n // 2]:.2g} | {sizes[math.ceil(0.95 * n) - 1]:.2g} "
                f"| {hits / n:.0%} | {surely(lost[oracle]):.2g} | {sum(swapped[oracle]) / n:.1%} |",
                flush=True,
            )


def surely(lost: list[tuple[float, bool]]) -> float:
    """The smallest size from which on 95 % of lost elements are caught."""
    best, hits = math.inf, 0
    for n, (size, hit) in enumerate(sorted(lost, reverse=True), 1):
        hits += hit
        if hits >= 0.95 * n:
            best = size
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("false-alarms", "detection"))
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--repeats", type=int, default=2, help="healthy runs of each program")
    parser.add_argument("--dtypes", nargs="+", default=[str(dtype)[6:] for dtype in DTYPES])
    options = parser.parse_args()
    chosen = [getattr(torch, name) for name in options.dtypes]
    torch.set_num_threads(1)
    if options.what == "false-alarms":
        false_alarms(chosen, options.programs, options.first, options.repeats)
    else:
        detection(chosen, options.programs, options.first)
