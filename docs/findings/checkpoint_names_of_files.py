# A checkpoint in safetensors that is put together can't be read if the table of files has a name without a tensor
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_names_of_files.py
# It exits with 1 where the defect is there.

import json
import struct
import sys
import tempfile
import types
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

DTYPES = {"F32": torch.float32}


def stored(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    """Return a file in the format of safetensors, which need not be installed."""
    header: dict[str, object] = {"__metadata__": metadata}
    data = b""
    for name, tensor in tensors.items():
        part = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        kind = next(each for each, dtype in DTYPES.items() if dtype == tensor.dtype)
        ends = [len(data), len(data) + len(part)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": ends}
        data += part
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


sys.modules["safetensors"] = types.ModuleType("safetensors")
sys.modules["safetensors.torch"] = module = types.ModuleType("safetensors.torch")
module.save, module._getdtype = stored, DTYPES.__getitem__

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
folders = [tempfile.mkdtemp()]
dist.broadcast_object_list(folders)
table = {"bias": 1, "weight": 1}  # of the whole model, of which a part is saved
writer = checkpoint.HuggingFaceStorageWriter(
    folders[0], fqn_to_index_mapping=table, save_distributed=True, enable_consolidation=True
)
expected: dict[str, str] | str = {"bias": "F32"}
try:
    checkpoint.save({"bias": torch.ones(2)}, storage_writer=writer)
except checkpoint.CheckpointException:
    observed: dict[str, str] | str = expected  # refused
else:
    dist.barrier()
    content = Path(folders[0], "model-00001-of-00001.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    observed = {name: about["dtype"] for name, about in header.items()}  # an empty dtype can't be read
print(f"expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
