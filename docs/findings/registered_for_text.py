# a backend that is registered for a device named by a text is the default one of its letters, and not of the device
# unreported
# Seen with torch 2.13.0+cpu, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 registered_for_text.py
# It exits with 1 where the defect is there.

import sys

import torch.distributed as dist

dist.Backend.register_backend("mine", lambda *arguments: None, devices="fpga")
try:
    observed = dist.get_default_backend_for_device("fpga")
except ValueError as e:
    observed = f"ValueError: {e}; of {[d for d, b in dist.Backend.default_device_backend_map.items() if b == 'mine']}"
print(f"expected mine, observed {observed}")
sys.exit(observed != "mine")
