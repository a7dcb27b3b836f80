# new_group with use_local_synchronization returns None to other ranks, which means the default group to collectives
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 local_group_none.py
# It exits with 1 where the defect is there.

import sys

import torch.distributed as dist

dist.init_process_group("gloo")
group = dist.new_group([0], use_local_synchronization=True)
observed = "the group" if dist.get_rank() == 0 else str(group)
expected = "the group" if dist.get_rank() == 0 else str(dist.GroupMember.NON_GROUP_MEMBER)
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
