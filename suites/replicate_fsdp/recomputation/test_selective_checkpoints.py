"""Selective checkpoints within managed modules, and checkpoints of modules on the meta device."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.limit import runs_with

SOURCE = "torch.utils.checkpoint.create_selective_checkpoint_contexts"
POLICIES = ("MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE")
PRODUCTS = ("mm", "addmm")
"""Operators of a layer, whose results are saved."""


def operators(*names: str) -> list[Any]:
    return [getattr(torch.ops.aten, name).default for name in names]


class Region(nn.Module):
    """A layer in a checkpointed region, whose result is changed in place or not before its sine is taken."""

    def __init__(self, changes: bool, **options: Any) -> None:
        super().__init__()
        self.layer, self.changes, self.options = nn.Linear(2, 2), changes, options
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def region(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return (y.mul_(2) if self.changes else y * 2).sin().exp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.region, x, use_reentrant=False, **self.options)
        return result * 1


def trained(rank: Rank, model: Any) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return the gradients of the parameters and of the input after a step."""
    x = torch.tensor([[0.25, -0.5]], device=rank.device, requires_grad=True)
    model(x).sum().backward()
    return list(replicate_fsdp.gradients(model).values()), x.grad


@requirement(
    "RFSDP-CKPT-3500",
    "A managed module with a selective checkpoint has the gradients that it has without, whatever the policy saves.",
    source=f"{SOURCE}: CheckpointPolicy",
)
@pytest.mark.parametrize("policy", [*POLICIES, "list", "of each"])
@pytest.mark.world(2)
def test_policies(world: World, policy: str) -> None:
    """One policy for all operators, a list of those that are saved, and other policies by turns; take two steps."""

    def chosen(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        name = POLICIES[len(op.name()) % 4] if policy == "of each" else policy
        return CheckpointPolicy[name]

    def body(rank: Rank) -> None:
        for way, manage in ways(rank).items():
            right: Any = manage(Region(False).to(rank.device))
            contexts = partial(
                create_selective_checkpoint_contexts, operators(*PRODUCTS) if policy == "list" else chosen
            )
            model: Any = manage(Region(False, context_fn=contexts).to(rank.device))
            for step in range(2):
                for one, other in zip(trained(rank, model), trained(rank, right), strict=True):
                    torch.testing.assert_close(one, other, msg=f"{way}, step {step}")

    world.run(body)


@requirement(
    "RFSDP-CKPT-3501",
    "The backward of a selective checkpoint raises if a saved result was changed in place, unless that is allowed.",
    source=f"{SOURCE}: allow_cache_entry_mutation",
)
@pytest.mark.world(2)
def test_changed_results(world: World) -> None:
    """Change the result of the layer in place after it is saved, or save none that is changed."""

    def body(rank: Rank) -> None:
        for manage, allowed in itertools.product(ways(rank).values(), (False, True)):
            for changes, saved in ((True, PRODUCTS), (False, PRODUCTS), (True, ("sin",))):
                names = operators(*saved)
                contexts = partial(create_selective_checkpoint_contexts, names, allow_cache_entry_mutation=allowed)
                model: Any = manage(Region(changes, context_fn=contexts).to(rank.device))
                if not changes or saved is not PRODUCTS or allowed:
                    trained(rank, model)
                    continue
                with pytest.raises(RuntimeError, match="mutated"):
                    trained(rank, model)

    world.run(body)


class Twice(Region):
    """A layer that a checkpointed region calls twice, with a sine after each call, and an exponential at last."""

    def region(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.layer(x).sin()).sin().exp()
        return result


COUNTED = ("addmm", "sin", "exp")
"""Operators that no gradient needs."""


class Counts(FlopCounterMode):
    """Count calls of those operators."""

    def __init__(self) -> None:
        ones = {getattr(torch.ops.aten, name): lambda *shapes, **options: 1 for name in COUNTED}
        super().__init__(display=False, custom_mapping=ones)  # type: ignore[arg-type]

    def calls(self) -> tuple[int, ...]:
        """Return how often each was called."""
        found: Any = self.get_flop_counts().get("Global", {})
        return tuple(found.get(getattr(torch.ops.aten, name), 0) for name in COUNTED)


SAVED: dict[str, tuple[Any, tuple[int, int, int]]] = {
    "list": (("addmm",), (0, 2, 1)),
    "lists": (("sin", "addmm"), (0, 0, 1)),
    "all": ("PREFER_SAVE", (0, 0, 0)),
    "none": ("MUST_RECOMPUTE", (2, 2, 1)),
    "preferably none": ("PREFER_RECOMPUTE", (2, 2, 1)),
    "each first": ({1: "PREFER_SAVE"}, (1, 1, 0)),
    "each second": ({2: "MUST_SAVE"}, (1, 1, 1)),
}
"""What is saved, by operators or by the number of a call, and how often a layer, a sine, an exponential run again."""


@requirement(
    "RFSDP-CKPT-5485",
    "The backward of a selective checkpoint computes again the operators that its policy does not save, and no others.",
    source=f"{SOURCE}: 'a list of operations', CheckpointPolicy: 'will not be recomputed during the backward pass'",
)
@requirement(
    "RFSDP-CKPT-5486",
    "The policy of a selective checkpoint is asked once for each operator of the forward, whose result it is given.",
    source="torch.utils.checkpoint.SelectiveCheckpointContext: 'only called during the forward pass', op_output",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="unsupported: before 2.13, policies are asked in backwards as well")
@pytest.mark.world(2, keeps="a policy that keeps results, in whose graphs it is")
def test_computed_again(world: World) -> None:
    """Save operators of a list, all, none, or the first or second call of each, in managed modules; take two steps."""

    def body(rank: Rank) -> None:
        for (way, manage), (what, (saved, due)) in zip(itertools.cycle(ways(rank).items()), SAVED.items()):
            asked: list[Any] = []

            def chosen(context: Any, op: Any, *args: Any, saved: Any = saved, asked: Any = asked, **kw: Any) -> Any:
                assert not context.is_recompute
                asked.append((op, context.op_output))
                name = saved.get([o for o, _ in asked].count(op)) if isinstance(saved, dict) else saved
                return CheckpointPolicy[name or "MUST_RECOMPUTE"]

            policy = operators(*saved) if isinstance(saved, tuple) else chosen
            contexts = partial(create_selective_checkpoint_contexts, policy)
            model: Any = manage(Twice(False, context_fn=contexts).to(rank.device))
            right: Any = manage(Twice(False).to(rank.device))
            for step in range(2):
                where = f"{way}, {what}, step {step}"
                asked.clear()
                x = torch.tensor([[0.25, -0.5]], device=rank.device, requires_grad=True)
                loss = model(x * 1).sum()  # of a leaf, the counter would take views that no forward has saved
                before = len(asked)
                with Counts() as counts:
                    loss.backward()
                assert counts.calls() == due, f"{where}: {counts.calls()}"
                assert len(asked) == before, f"{where}: asked {len(asked) - before} times in the backward"
                if policy is chosen:
                    found = [o for o, _ in asked if o in operators(*COUNTED)]
                    assert found == operators("addmm", "sin", "addmm", "sin", "exp"), where
                    assert asked[-1][1].sum().item() == loss.item(), where
                gradients = [*replicate_fsdp.gradients(model).values(), x.grad]
                for one, other in zip(gradients, flat(trained(rank, right)), strict=True):
                    torch.testing.assert_close(one, other, msg=where)

    world.run(body)


def flat(results: tuple[list[torch.Tensor], torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return gradients of parameters and of the input in one list."""
    return [*results[0], results[1]]


@requirement(
    "RFSDP-CKPT-3502",
    "A checkpointed module on the meta device has outputs and gradients on the meta device, with the shapes that they "
    "have elsewhere.",
    source="torch.utils.checkpoint.checkpoint: use_reentrant, preserve_rng_state; torch.device('meta')",
)
@pytest.mark.world(2)
def test_on_meta(world: World) -> None:
    """Checkpoint in both ways, with random numbers restored or not, a module that is about to be managed."""

    def body(rank: Rank) -> None:
        for manage, reentrant, restores in itertools.product(ways(rank).values(), (False, True), (False, True)):
            with torch.device("meta"):
                module = nn.Linear(4, 2)
                x = torch.ones(3, 4, requires_grad=True)
            y = checkpoint(module, x, use_reentrant=reentrant, preserve_rng_state=restores)
            y.sum().backward()
            found = [y, x.grad, module.weight.grad, module.bias.grad]
            assert [(t.device.type, tuple(t.shape)) for t in found if t is not None] == [
                ("meta", shape) for shape in ((3, 2), (3, 4), (2, 4), (2,))
            ], (reentrant, restores)
            module.zero_grad()
            managed: Any = manage(module).to_empty(device=rank.device)
            nn.init.ones_(managed.weight)
            nn.init.zeros_(managed.bias)
            given = torch.ones(3, 4, device=rank.device, requires_grad=True)
            checkpoint(managed, given, use_reentrant=False).sum().backward()
            assert replicate_fsdp.gradients(managed)["bias"].tolist() == [3.0, 3.0]

    world.run(body)
