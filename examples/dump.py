"""Saves real training tensors as raw little-endian bf16, one flat file per kind: input for codec benchmarks.

weights_before_bf16.bin, weights_after_bf16.bin   all parameters, one optimizer step apart
grads_<n>workers_bf16.bin                         n workers' gradients of the same parameters, before any reduction
activations_bf16.bin                              the output of every block, on rank 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT


def dump(directory: Path, model: torch.nn.Module, tokens: torch.Tensor, step: Callable[[], object]) -> None:
    """`tokens`: this rank's batch for the gradients; `step`: does one optimizer step of the sharded `model`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    directory.mkdir(parents=True, exist_ok=True)
    before = full_weights(model)
    step()
    after = full_weights(model)

    # What a worker computes before any reduction FSDP never shows, so an unsharded bf16 copy computes it again.
    copy = GPT(context=model.position.shape[0]).to(tokens.device, torch.bfloat16)
    copy.load_state_dict(before)
    activations: list[torch.Tensor] = []
    for block in copy.blocks:
        block.register_forward_hook(lambda module, args, output: activations.append(output.detach()))
    copy(tokens).backward()

    gradients = flat_bytes(p.grad for p in copy.parameters())
    path = directory / f"grads_{world}workers_bf16.bin"
    if rank == 0:
        (directory / "weights_before_bf16.bin").write_bytes(flat_bytes(before.values()))
        (directory / "weights_after_bf16.bin").write_bytes(flat_bytes(after.values()))
        (directory / "activations_bf16.bin").write_bytes(flat_bytes(activations))
        path.write_bytes(b"")
    dist.barrier()
    with path.open("r+b") as file:
        file.seek(rank * len(gradients))
        file.write(gradients)


def full_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, gathered from its shards, as the bf16 that FSDP sends."""
    return {name: p.detach().bfloat16().full_tensor() for name, p in model.named_parameters()}


def flat_bytes(tensors: Iterable[torch.Tensor]) -> bytes:
    flat = torch.cat([t.detach().bfloat16().flatten() for t in tensors])
    return flat.cpu().view(torch.uint8).numpy().tobytes()
