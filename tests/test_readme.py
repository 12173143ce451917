"""README.md's Python: every block runs, in the order in which it stands there."""

import contextlib
import io
import re
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
# Where the ranks of these tests meet, and with NCCL's place taken by gloo: it is attached to in the same way.
GROUPS = {'dist.init_process_group("zipccl")': 'init("zipccl")', 'dist.init_process_group("nccl")': 'init("gloo")'}


def run_blocks(rank):
    def init(backend):
        if dist.is_initialized():
            dist.destroy_process_group()
        ranks.init(backend)

    tensor = torch.randn(10_000, generator=torch.Generator().manual_seed(rank)).bfloat16()
    names = {"init": init, "tensor": tensor.clone()}
    printed = io.StringIO()
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            if "ddp_model" in block:
                names["ddp_model"] = DistributedDataParallel(nn.Linear(100, 100))
                names["model"] = fully_shard(nn.Linear(100, 100), mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
            for said, here in GROUPS.items():
                block = block.replace(said, here)
            exec(block, names)
            if "ddp_model" in block:
                for name in ("ddp_model", "model"):
                    names[name](torch.ones(2, 100)).sum().backward()
    assert ranks.same_bits(names["same"], tensor) and names["choice"].reduce_scatter.calls == 1
    assert names["state"].calls == 2 and not ranks.same_bits(names["tensor"], tensor)
    bits = re.search(r"`(8 \* zipccl\.compress\(.*?)`", README)[1]
    assert 10 < eval(bits, names | {"tensor": tensor}) < 13
    return len(blocks), printed.getvalue()


def test_its_blocks_run():
    assert ranks.run(run_blocks, 2) == [(4, "no collective of this group was called yet\n")] * 2
