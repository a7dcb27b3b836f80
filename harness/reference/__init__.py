"""The stacks implemented again, from their behavior: executable specifications that take ten minutes each to read.

They are written for reading: on PyTorch's public API, without buckets, streams or caches, whatever that costs. They run
as the subject ``reference`` (:mod:`harness.subjects`). ``docs/reference.md`` says where they differ from PyTorch.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from harness.faults import in_modules
from harness.reference import replicate, replicate_fsdp, tp_extension
from harness.stacks import replicate as torch_replicate
from harness.stacks import replicate_fsdp as torch_replicate_fsdp
from harness.stacks import tp_extension as torch_tp_extension


def put_replicate() -> None:
    """Replace PyTorch's composable DDP and DistributedDataParallel with ours in this process."""
    in_modules(
        (torch_replicate.replicate, replicate.replicate),
        (torch_replicate.DDP, replicate.DDP),
        (DistributedDataParallel, replicate.DistributedDataParallel),
    )


def put_replicate_fsdp() -> None:
    """Replace PyTorch's FSDP-replicate with ours in this process."""
    in_modules(
        (torch_replicate_fsdp.replicate, replicate_fsdp.replicate),
        (torch_replicate_fsdp.ReplicateModule, replicate_fsdp.ReplicateModule),
    )


def put_tp_extension() -> None:
    """Replace PyTorch's TP extension with ours in this process."""
    in_modules(
        (torch_tp_extension.DTensorExtensions, tp_extension.DTensorExtensions),
        (torch_tp_extension.rewrite_spec, tp_extension.rewrite_spec),
    )
