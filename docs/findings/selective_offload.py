# A selective checkpoint recomputes results of CheckpointPolicy.MUST_CPU_OFFLOAD, so that gradients are silently wrong
# https://github.com/pytorch/pytorch/pull/180874
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 selective_offload.py
# It exits with 1 where the defect is there: the backward draws other random numbers than the forward.

import sys
from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def gradient_of(policy: str) -> str:
    """Return whether the gradient of x times random numbers is those random numbers, which the policy saves."""
    contexts = partial(create_selective_checkpoint_contexts, lambda *args, **options: CheckpointPolicy[policy])
    x = torch.ones(8, requires_grad=True)
    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    y = checkpoint(lambda x: x * torch.rand_like(x), x, **options)
    y.sum().backward()
    return "right" if torch.equal(x.grad, y) else "wrong"


torch.manual_seed(0)
policies = ("MUST_SAVE", "MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
observed, expected = {policy: gradient_of(policy) for policy in policies}, dict.fromkeys(policies, "right")
print(f"expected {expected}, observed {observed}", flush=True)
sys.exit(observed != expected)
