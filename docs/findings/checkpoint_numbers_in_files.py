# HuggingFaceStorageWriter silently writes a file that can't be read if the state has a number
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_numbers_in_files.py
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
writer = checkpoint.HuggingFaceStorageWriter(folders[0], save_distributed=True)
expected: list[str] | str = ["bias"]
try:
    checkpoint.save({"bias": torch.ones(2), "step": 3}, storage_writer=writer)
except checkpoint.CheckpointException:
    observed: list[str] | str = expected  # refused
else:
    dist.barrier()
    observed = []
    for file in Path(folders[0]).glob("*.safetensors"):
        content = file.read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        if end > len(content):
            observed = "a file whose header is longer than the file"
            break
        observed += [name for name in json.loads(content[8:end]) if name == "bias"]
print(f"expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
