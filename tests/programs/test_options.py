"""Each thing that a layout or a schedule may ask for: healthy ranks pass, and ranks that do otherwise are found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from harness import Rank, RanksFailed
from harness.programs import execute
from harness.programs.assertion import assert_same_as_alone
from harness.programs.problem import Different
from harness.specs.program import Compile, Hooked, Layout, Linear, Model, Option, Program, Scale, Step
from harness.stacks import replicate_fsdp
from harness.stacks.seen import Seen
from tests.programs.damaged import Damaged

Wrong = tuple[str, str]
"""The kind of a problem, and of what was seen."""
Damage = Callable[[Rank], None]


def nothing(rank: Rank) -> None:
    pass


def replicated(*layers: Any, steps: tuple[Step, ...] = (Step(rows=(4, 2)),), **options: Option) -> Program:
    """On FSDP2's machinery and two ranks, in float32."""
    layout = Layout("replicate_fsdp", options=tuple(options.items()))
    return Program(Model((3,), layers or (Linear(3), Linear(2))), layout, steps, dtype="float32")


def undivided(rank: Rank) -> None:
    """The loss is multiplied as if nobody had set a factor."""
    execute.training.Party.factor = property(lambda party: party.parts)  # type: ignore[assignment,method-assign]


def never_cast(rank: Rank) -> None:
    replicate_fsdp.dtype_of = lambda name: None


def never_toggled(rank: Rank) -> None:
    execute.prelude.toggle = lambda model, name: None


def other_scale(rank: Rank) -> None:
    """Ranks multiply with each other's scale."""

    def per_part(party: Any, scale: Any, parts: int) -> None:
        scale.shares = [0]
        scale.scale += 1 - party.part

    execute.prelude.per_part = per_part


def called_twice(rank: Rank) -> None:
    """Of the hooks on rank 1, which do nothing the second time."""
    counts = execute.prelude.Hooked.doubled

    def doubled(self: Any, layer: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return counts(self, layer, inputs, output)

    if rank.index == 1:
        execute.prelude.Hooked.doubled = doubled  # type: ignore[method-assign]


def deaf(rank: Rank) -> None:
    """Tensors do not call their hooks."""
    torch.Tensor.register_hook = lambda tensor, hook: None  # type: ignore[assignment,method-assign]


def never_unpacked(rank: Rank) -> None:
    """What a hook of saved tensors has packed is used as it is."""
    made = torch.autograd.graph.saved_tensors_hooks.__init__

    def packs(self: Any, pack: Any, unpack: Any) -> None:
        made(self, pack, lambda saved: saved)

    torch.autograd.graph.saved_tensors_hooks.__init__ = packs  # type: ignore[method-assign]


def other_losses(rank: Rank) -> None:
    """Rank 1 weights its outputs otherwise, by a factor that its gradients are divided by."""
    part = execute.prelude.Run.part
    if rank.index == 1:

        def doubled(self: Any, whole: torch.Tensor) -> torch.Tensor:
            return 2 * part(self, whole) if whole.shape[-1] == 2 else part(self, whole)

        execute.prelude.Run.part = doubled  # type: ignore[method-assign]


def stays_wide(rank: Rank) -> None:
    """What was float64 while it was wrapped is never cast back."""
    plain = torch.nn.Module.to

    def to(self: Any, *args: Any, **options: Any) -> Any:
        return self if args == (torch.float32,) else plain(self, *args, **options)

    torch.nn.Module.to = to  # type: ignore[method-assign]


THAWED = (Step(rows=(4,), toggle="linear1"), Step(rows=(4,), toggle="linear1"))
CASES: dict[str, tuple[Program, Damage, Wrong]] = {
    "divide factor": (replicated(divide=4.0), undivided, ("values", "gradient")),
    "mixed precision": (replicated(param_dtype="bfloat16"), never_cast, ("dtype", "output")),
    "thawed": (replicated(steps=THAWED), never_toggled, ("unexpected", "gradient")),
    "scale of parts": (replicated(Linear(3), Scale("per_rank"), Linear(2)), other_scale, ("values", "output")),
    "hooks": (replicated(Hooked(Linear(3)), Linear(2)), called_twice, ("values", "calls")),
    "hooks of tensors": (replicated(Hooked(Linear(3), "tensor"), Linear(2)), deaf, ("values", "gradient")),
    "hooks of saved tensors": (
        replicated(Hooked(Linear(3), "saved"), Linear(2)),
        never_unpacked,
        ("values", "gradient"),
    ),
    "losses": (replicated(), other_losses, ("values", "losses")),
}
RAISED: dict[str, tuple[Program, Damage, str]] = {"re-cast": (replicated(recast=True), stays_wide, "same dtype")}


@pytest.fixture(scope="module")
def sound() -> Iterator[Damaged]:
    with Damaged(nothing) as worlds:
        yield worlds


@pytest.mark.parametrize("case", list(CASES))
def test_found_out(case: str, sound: Damaged, tmp_path: Any, monkeypatch: Any) -> None:
    """Nothing is said of healthy ranks; of damaged ones, what is wrong."""
    monkeypatch.setenv("CONCORD_REPRODUCERS", str(tmp_path))
    program, damage, wrong = CASES[case]
    assert_same_as_alone(sound, program)
    with Damaged(damage) as worlds, pytest.raises(Different) as error:
        assert_same_as_alone(worlds, program)
    assert wrong in {(p.kind, p.what.kind) for p in error.value.problems if isinstance(p.what, Seen)}


@pytest.mark.parametrize("case", list(RAISED))
def test_raised(case: str, sound: Damaged, tmp_path: Any, monkeypatch: Any) -> None:
    """Healthy ranks train; damaged ones raise what torch says."""
    monkeypatch.setenv("CONCORD_REPRODUCERS", str(tmp_path))
    program, damage, message = RAISED[case]
    assert_same_as_alone(sound, program)
    with Damaged(damage) as worlds, pytest.raises(RanksFailed) as error:
        assert_same_as_alone(worlds, program)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "program",
    [
        replicated(mesh="1x2"),
        replicated(mesh="2x1"),
        replicated(reduce_dtype="float16", sums=True),
        replicated(Linear(3, frozen=True), Linear(2), ignored=("linear0",)),
        replicated(Hooked(Linear(3), "before"), Hooked(Linear(3), "backward"), Linear(2)),
        replicated(Hooked(Linear(3), "tensor"), Hooked(Linear(3), "node"), Hooked(Linear(3), "saved"), Linear(2)),
        Program(Model((3,), (Linear(0), Linear(2))), Layout("replicate"), dtype="float32"),
        Program(Model((3,), (Linear(2),)), Layout("replicate", options=(("hook", "fp16_compress_hook"),))),
        Program(Model((3,), (Linear(2),)), Layout("replicate", options=(("static_graph", True),)), (Step(), Step())),
        Program(Model((3,), (Linear(2),)), Layout("dynamo", compiled=Compile(first=True, fullgraph=True))),
        Program(
            Model((4,), (Linear(4),)),
            Layout(
                "tp_extension",
                world=4,
                options=(("use_orig_params", False), ("strategy", "HYBRID_SHARD"), ("replicas", 2)),
            ),
            dtype="float32",
        ),
        Program(
            Model((4,), (Linear(4),)),
            Layout("dynamo", options=(("use_orig_params", True), ("inner", "tp_extension")), compiled=Compile()),
            dtype="float32",
        ),
    ],
    ids=lambda p: f"{p.layout.stack} {' '.join(key for key, _ in p.layout.options)}",
)
def test_healthy(program: Program, sound: Damaged, tmp_path: Any, monkeypatch: Any) -> None:
    """What else may be asked for trains as one device does."""
    monkeypatch.setenv("CONCORD_REPRODUCERS", str(tmp_path))
    assert_same_as_alone(sound, program)
