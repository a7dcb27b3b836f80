# A launcher raises JSONDecodeError, and does not say which worker failed, if its error file is not whole (full disk)
# https://github.com/pytorch/pytorch/pull/56739 set out to make that no error
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 elastic_error_file.py
# It exits with 1 where the defect is there.

import os
import resource
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


@record
def work() -> None:
    """Fail where no file can have more than 40 bytes, as on a disk that is full by then."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
    raise ValueError("the worker's own words")


if sys.argv[1:] == ["worker"]:
    work()
for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK"))]:
    del os.environ[name]
config = LaunchConfig(
    min_nodes=1,
    max_nodes=1,
    nproc_per_node=1,
    rdzv_backend="c10d",
    rdzv_endpoint="localhost:0",
    max_restarts=0,
    monitor_interval=0.1,
)
observed = "nothing"
try:
    elastic_launch(config, sys.executable)(__file__, "worker")
except ChildFailedError as error:
    observed = "ChildFailedError" if "exitcode  : 1" in str(error) else str(error)
except Exception as error:
    observed = f"{type(error).__name__}: {error}"
print(f"expected ChildFailedError, observed {observed}", flush=True)
sys.exit(observed != "ChildFailedError")
