# async_save silently saves a lazily conjugated or negated tensor without the conjugation or the sign
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_lazy_views.py
# It exits with 1 where the defect is there.

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

dist.init_process_group("gloo")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
conjugate = torch.tensor([1 + 2j]).conj()
state = {"conjugate": conjugate, "negative": conjugate.imag}
expected = {name: tensor.tolist() for name, tensor in state.items()}
checkpoint.async_save(state, checkpoint_id=folder[0]).result()
loaded = {"conjugate": torch.zeros(1, dtype=torch.complex64), "negative": torch.zeros(1)}
checkpoint.load(loaded, checkpoint_id=folder[0])
observed = {name: tensor.tolist() for name, tensor in loaded.items()}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
