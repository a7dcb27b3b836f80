"""The main function of a reproducer: train alone and on ranks, compare, and print what differs.

A reproducer contains the definitions of this file, so nothing here may import Concord.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.stacks.seen import Launched, Pass, Seen
from harness.stacks.training import Party


@dataclass(frozen=True)
class Case:
    """How a program is run on ranks, and what is checked there."""

    world: int
    backend: str
    device: str
    """Type of the ranks' device."""
    dtype: torch.dtype
    tensor: int
    """The number of tensor-parallel ranks that share one part of a batch."""
    rotated: int
    """By how many places the parts of a batch are rotated among ranks."""
    parts: int
    limit: int
    """Seconds after which a run counts as a hang."""
    allowed: Mapping[Seen, list[float]] | None
    """The absolute differences that rounding explains, for the tensors that differed; None if every bit must agree."""
    promised: frozenset[Seen]
    """Tensors that were missing, and that ranks must have."""
    zeros_allowed: bool
    """Whether a gradient of zeros may stand for none. FSDP1 gives one to a parameter that nothing has used."""
    synced: bool
    """Whether a synchronized backward must launch collectives."""
    quiet_unsynced: bool
    """Whether a backward without synchronization must launch no collective."""
    compiled: bool
    same_shapes: bool
    """Whether all ranks see the same shapes, so that they compile the same graphs."""


def wrong_values(
    case: Case, party: Party, alone: Mapping[Seen, torch.Tensor], tensors: Mapping[Seen, torch.Tensor]
) -> list[str]:
    """Return how this rank differs from the single device, as a list of sentences."""
    problems = []
    for seen, observed in tensors.items():
        if seen not in alone:
            if not (case.zeros_allowed and not observed.any()):
                problems.append(f"{seen}: absent on one device, observed {observed}")
            continue
        expected = rows_of(party, seen, alone[seen])
        if observed.shape != expected.shape:
            problems.append(f"{seen}: expected shape {tuple(expected.shape)}, observed {tuple(observed.shape)}")
            continue
        if case.allowed is not None and seen not in case.allowed:
            continue  # rounded, but within its tolerance when this file was written
        allowed = torch.zeros(())
        if case.allowed is not None:
            whole = torch.tensor(case.allowed[seen], dtype=torch.float64).view(alone[seen].shape)
            allowed = rows_of(party, seen, whole)
        apart = (observed.double() - expected.double()).abs()
        wrong = ~((apart <= allowed) | allowed.isinf())  # NaN is wrong, unless any value is allowed
        if wrong.any():
            values = f"\n  expected {expected}\n  observed {observed}"
            problems.append(f"{seen}: {int(wrong.sum())} of {wrong.numel()} elements differ{values}")
    return problems + [f"{seen}: missing" for seen in case.promised if seen in alone and seen not in tensors]


def rows_of(party: Party, seen: Seen, whole_tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of the single device's tensor that this rank has."""
    return whole_tensor.tensor_split(party.parts)[party.part] if seen.of_part else whole_tensor


def disagreements(case: Case, party: Party, tensors: Mapping[Seen, torch.Tensor]) -> list[str]:
    """Return how this rank differs from rank 0, and what was counted wrong, as a list of sentences.

    All ranks must call this.
    """
    bits = {}
    for seen, tensor in tensors.items():
        if not seen.of_part and tensor.numel():
            bits[seen] = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    everyone: list[Any] = [None] * party.world
    dist.all_gather_object(everyone, (bits, party.launched, party.graphs))
    first_bits, _, first_graphs = everyone[0]
    problems = [f"{seen}: different bits than on rank 0" for seen in bits if first_bits.get(seen) != bits[seen]]
    launched_by_rank: list[Mapping[Pass, Launched]] = [launched for _, launched, _ in everyone]
    for key, groups in party.launched.items():
        for group, count in groups.items():
            counts = [launched_by_rank[rank].get(key, {}).get(group, 0) for rank in group]
            if len(set(counts)) > 1:
                problems.append(f"{key}: ranks {group} launched different numbers of collectives: {counts}")
            if case.quiet_unsynced and key.phase == "unsynced":
                problems.append(f"{key}: {count} collectives without gradient synchronization")
        if case.synced and key.phase == "synced" and not groups:
            problems.append(f"{key}: no collective, though gradients are to be synchronized")
    if case.compiled and (not party.graphs or (case.same_shapes and party.graphs != first_graphs)):
        problems.append(f"compiled graphs of {party.graphs} nodes, rank 0 of {first_graphs}")
    return problems


def main(
    case: Case,
    build: Callable[[Party], nn.Module],
    distribute: Callable[[Party, nn.Module], Any],
    train: Callable[[Party, Any], dict[Seen, torch.Tensor]],
) -> None:
    """Train alone and on ranks, and print what differs. Exits with 1 if anything differs, and with 0 otherwise."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != case.world:
        sys.exit(f"this needs {case.world} ranks: torchrun --nproc-per-node={case.world} {sys.argv[0]}")
    faulthandler.dump_traceback_later(case.limit, exit=True)  # a hang is a defect, too, and exits with 1
    one = Party()
    alone = train(one, build(one))  # without process groups, so that a defect that needs them does not affect this run
    dist.init_process_group(case.backend, timeout=datetime.timedelta(seconds=case.limit // 2))
    device = torch.device("cpu") if case.device == "cpu" else torch.device(case.device, int(os.environ["LOCAL_RANK"]))
    part = (rank // case.tensor + case.rotated) % case.parts
    party = Party(dtype=case.dtype, device=device, index=rank, world=world, part=part, parts=case.parts)
    tensors = train(party, distribute(party, build(party)))
    problems = wrong_values(case, party, alone, tensors) + disagreements(case, party, tensors)
    for problem in problems:
        print(f"rank {rank}: {problem}", flush=True)
    if not problems:
        print(f"rank {rank}: as on one device", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(1 if problems else 0)


__all__ = ["Case", "main"]
