"""The buffers of context_parallel: which part of the sequence each of them has, and the whole sequence again."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with
from harness.stacks.tp_extension import context_parallel_unshard

SOURCE = "torch.distributed.tensor.experimental.context_parallel"
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "positions": ((1,), 0),
    "rotations": ((1, 3), 0),
    "tokens": ((2, 1), 1),
    "hidden": ((2, 1, 3), 1),
    "heads": ((2, 2, 1, 3), 2),
}
"""Sizes but for that of the sequence, which is 1, and the dimension of the sequence."""
UNBALANCED = (1, 3, 5) if runs_with(">=2.13") else ()
"""How many positions a rank may have that cannot be balanced, which context_parallel refused before 2.13."""
POSITIONS = [*((i, 4) for i in range(len(SHAPES))), *enumerate((2, *UNBALANCED))]
"""Which buffer is the first one, and how many positions each rank has."""


@requirement(
    "TP-CONTEXT-4927",
    "Within context_parallel all buffers have the same positions of the sequence, whichever dimension it is.",
    source=f"{SOURCE}: buffers, buffer_seq_dims",
)
@requirement(
    "TP-CONTEXT-4928",
    "Within context_parallel the ranks together have each position of the sequence once.",
    source=f"{SOURCE}: buffers, buffer_seq_dims",
)
@requirement(
    "TP-CONTEXT-5547",
    "Gradients are recorded within context_parallel, after which buffers and attention are back, even after an error.",
    source=f"{SOURCE}: 'The buffers will be restored after the context finishes'; torch.autograd",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(2, 3)
def test_positions(world: World) -> None:
    """Elements are their positions; each buffer is the first one once, and one or two, anywhere, are not restored."""

    def body(rank: Rank) -> list[list[int]]:
        found = []
        for i, each in POSITIONS:
            length = each * rank.size
            names = [*SHAPES][i:] + [*SHAPES][:i]
            buffers, dims = [], [SHAPES[name][1] for name in names]
            for name, dim in zip(names, dims, strict=True):
                shape = SHAPES[name][0]
                at = [length if j == dim else 1 for j in range(len(shape))]
                sizes = [length if j == dim else size for j, size in enumerate(shape)]
                buffers.append(torch.arange(length, device=rank.device).view(at).expand(sizes).clone())
            wholes = [buffer.clone() for buffer in buffers]
            left = {buffers[j] for j in (i - 1, (i + 1) % len(names))[: i + 1]}
            with context_parallel(rank.mesh(), buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=left):
                parts = [x.movedim(dim, -1).reshape(-1, each) for x, dim in zip(buffers, dims, strict=True)]
                own = parts[0][0].tolist()
                for name, part in zip(names, parts, strict=True):
                    assert part.tolist() == [own] * len(part), f"{name} after {names[0]}, which has {own}"
            for name, dim, whole, buffer in zip(names, dims, wholes, buffers, strict=True):
                if buffer in left:
                    assert buffer.shape[dim] == each, f"{name}, which is not restored"
                else:
                    assert torch.equal(whole, buffer), f"{name} afterwards"
            found.append(own)
        check_block(rank)
        return found

    def check_block(rank: Rank) -> None:
        whole = torch.arange(8.0 * rank.size, device=rank.device).reshape(-1, 2)
        weight = torch.ones(2, device=rank.device, requires_grad=True)
        attention = functional.scaled_dot_product_attention
        # before 2.13, nothing is restored after an error
        errors = (None, KeyError, None) if runs_with(">=2.13") else (None,)
        for error in errors:
            buffers, dims = [whole.clone(), whole.t().clone()], [0, 1]
            given = list(buffers)
            block = context_parallel(rank.mesh(), buffers=buffers, buffer_seq_dims=dims)
            with contextlib.suppress(KeyError), block:
                part = buffers[0].clone()
                (weight * buffers[0]).sum().backward()
                if error is not None:
                    raise error
            assert weight.grad is not None, f"{error}: no gradient"
            assert weight.grad.tolist() == part.sum(0).tolist(), f"{error}"
            weight.grad = None
            assert all(one is other for one, other in zip(given, buffers, strict=True)), f"{error}: another list"
            assert dims == [0, 1], f"{error}: {dims}"
            for buffer, right in zip(buffers, (whole, whole.t()), strict=True):
                assert torch.equal(buffer, right), f"{error}: buffer of {list(buffer.shape)}"
            assert functional.scaled_dot_product_attention is attention, f"{error}: attention"
            assert torch.is_grad_enabled(), f"{error}"
        for options in {"buffer_seq_dims": [0, 0]}, {"buffer_seq_dims": [0], "no_restore_buffers": {whole.clone()}}:
            block = context_parallel(rank.mesh(), buffers=[whole], **options)
            with pytest.raises(ValueError, match="buffers"), block:
                pass

    for (_, each), found in zip(POSITIONS, zip(*world.run(body), strict=True), strict=True):
        assert sorted(itertools.chain(*found)) == list(range(each * world.size)), found


@requirement(
    "TP-CONTEXT-5340",
    "context_parallel_unshard puts the parts of each buffer together, and each sequence of a batch into order.",
    source="torch/distributed/tensor/experimental/_context_parallel/_attention.py: context_parallel_unshard: "
    "'Unshard the tensors (e.g., output) that are sharded due to context parallelism'",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(2, 3)
def test_unsharded(world: World) -> None:
    """Take one to three sequences of tokens, hidden states and heads, short ones too, one kind or all in one call."""

    def body(rank: Rank) -> None:
        kinds = ("tokens", "hidden", "heads")
        groups = (*((name,) for name in kinds), kinds, kinds[::-1])
        lengths = [*itertools.product((1, 2, 3), (4,)), *itertools.product((2,), (2, *UNBALANCED))]
        for (batch, each), names in itertools.product(lengths, groups):
            length = each * rank.size
            buffers, dims = [], [SHAPES[name][1] for name in names]
            for name, dim in zip(names, dims, strict=True):
                sizes = [batch, *SHAPES[name][0][1:]]
                sizes[dim] = length
                buffers.append(torch.arange(math.prod(sizes), device=rank.device).view(sizes))
            wholes = [buffer.clone() for buffer in buffers]
            with context_parallel(rank.mesh(), buffers=buffers, buffer_seq_dims=dims):
                parts = [buffer.clone() for buffer in buffers]
            found = context_parallel_unshard(rank.mesh(), parts, dims)
            for name, whole, result in zip(names, wholes, found, strict=True):
                assert torch.equal(whole, result), f"{name} of {names}, {batch} sequences of {length}: {result}"

    world.run(body)
