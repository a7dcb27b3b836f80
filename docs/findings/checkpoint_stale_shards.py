# HuggingFaceStorageWriter silently puts shards of an earlier checkpoint at the same place together with the new ones
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_stale_shards.py
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

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
alone = dist.new_group([0])


def save(rows: int, value: float, group: dist.ProcessGroup | None, size: int) -> None:
    """Save a matrix that the ranks of a group share."""
    writer = checkpoint.HuggingFaceStorageWriter(folders[0], save_distributed=True, enable_consolidation=True)
    mesh = DeviceMesh("cpu", list(range(size)))
    state = {"w": distribute_tensor(torch.full((rows, 1), value), mesh, [Shard(0)])}
    checkpoint.save(state, storage_writer=writer, process_group=group)


save(6, 1.0, None, 2)
if dist.get_rank() == 0:
    save(4, 2.0, alone, 1)
dist.barrier()
content = Path(folders[0], "model-00001-of-00001.safetensors").read_bytes()
end = 8 + struct.unpack("<Q", content[:8])[0]
observed = list(struct.unpack(f"<{(len(content) - end) // 4}f", content[end:]))
expected = [2.0, 2.0, 2.0, 2.0]
print(f"expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
