# With set_reduce_scatter_unused_params, FSDP2 silently mixes up gradients of groups if a rank does not use a group
# https://github.com/pytorch/pytorch/issues/158719
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_unused_groups.py
# It exits with 1 where the defect is there. Ranks reduce a group that they do not use after all others, and one that
# they use in the order of the backward. With reshard_after_forward=True, the default of inner groups, the job hangs
# instead, because the backward gathers only groups that it uses. The option was made for the issue.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = (nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, with_image: bool) -> torch.Tensor:
        text, image = self.text(x), self.image(x)
        return text + 3 * image if with_image else text


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
model = Model()
for module in (model.text, model.image, model):
    fully_shard(module, reshard_after_forward=False)
if not hasattr(model, "set_reduce_scatter_unused_params"):
    sys.exit(0)  # an older PyTorch
model.set_reduce_scatter_unused_params(True)
model(torch.ones(1, 2, requires_grad=True), with_image=rank == 0).sum().backward()
observed = {name: p.grad.full_tensor().mean().item() for name, p in model.named_parameters()}
expected = {"text.weight": 1.0, "image.weight": 1.5}
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
