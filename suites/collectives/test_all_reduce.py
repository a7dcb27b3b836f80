"""all_reduce."""
import torch, torch.distributed as dist, pytest
from harness import spmd

@pytest.mark.world(1,2,3,4)
def test_a(world):
    def body(rank):
        x=torch.ones(4)*rank.index; dist.all_reduce(x); return x
    for x in world.run(body): assert x.tolist()==[sum(range(world.size))]*4

@spmd(2)
def test_b(rank):
    x=torch.ones(4)*rank.index; dist.all_reduce(x)
    assert x.tolist()==[1]*3+[rank.index]
@spmd
def test_c(rank):
    dist.barrier()
@spmd
def test_d(rank):
    if rank.index: dist.barrier()
    print('hello')
