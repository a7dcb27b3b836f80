# HuggingFaceStorageWriter with enable_consolidation raises TypeError for integers, and silently halves complex tensors
# https://github.com/pytorch/pytorch/issues/192485
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_consolidated_integers.py
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

DTYPES = {"F32": torch.float32, "I64": torch.int64, "C64": torch.complex64}


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


def sizes(tensor: torch.Tensor) -> list[int] | str:
    """Save a tensor, and return how many bytes of it there are where all are put together."""
    writer = checkpoint.HuggingFaceStorageWriter(folders[0], save_distributed=True, enable_consolidation=True)
    try:
        checkpoint.save({"x": tensor}, storage_writer=writer)
    except checkpoint.CheckpointException as error:
        return str(error).strip().splitlines()[-1]
    content = Path(folders[0], "model-00001-of-00001.safetensors").read_bytes()
    return len(content) - 8 - struct.unpack("<Q", content[:8])[0]


observed = [sizes(torch.ones(2)), sizes(torch.ones(2, dtype=torch.int64)), sizes(torch.ones(2, dtype=torch.complex64))]
expected = [8, 16, 16]
print(f"expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
