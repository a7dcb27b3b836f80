# DefaultLoadPlanner(flatten_state_dict=False) silently loads tensors alone: no numbers, text or dicts
# https://github.com/pytorch/pytorch/issues/92823
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 checkpoint_unflattened.py
# It exits with 1 where the defect is there.

import sys
import tempfile

import torch
import torch.distributed.checkpoint as checkpoint

folder = tempfile.mkdtemp() + "/saved"
saved = {"weight": torch.ones(2), "step": 5, "deep": {"lr": 0.5}}
checkpoint.save(saved, checkpoint_id=folder, planner=checkpoint.DefaultSavePlanner(flatten_state_dict=False))
state = {"weight": torch.zeros(2), "step": 0, "deep": {"lr": 0.0}}
checkpoint.load(state, checkpoint_id=folder, planner=checkpoint.DefaultLoadPlanner(flatten_state_dict=False))
found = [state["weight"].tolist(), state["step"], state["deep"]]
expected = [[1.0, 1.0], 5, {"lr": 0.5}]
print(f"expected {expected}, observed {found}", flush=True)
sys.exit(found != expected)
