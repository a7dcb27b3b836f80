# A DefaultStager that stages asynchronously keeps the last copies, as large as the state, after its close()
# unreported
# Seen with torch 2.13.0+cpu, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 checkpoint_stager_keeps.py
# It exits with 1 where the defect is there.

import sys
import weakref

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

observed = {}
for apart in False, True:
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=apart, use_non_blocking_copy=False
        )
    )
    copies = stager.stage({"tensor": torch.ones(3)})
    copies = copies.result() if apart else copies
    copy = weakref.ref(copies["tensor"].untyped_storage())
    del copies
    stager.close()  # "Clean up all resources used by the DefaultStager", but not its last future, which has the copies
    observed["asynchronous" if apart else "synchronous"] = "freed" if copy() is None else "kept"
expected = {"synchronous": "freed", "asynchronous": "freed"}
print(f"expected {expected}, observed {observed}", flush=True)
sys.exit(observed != expected)
