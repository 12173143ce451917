"""Saves real training tensors as raw little-endian values, one flat file per kind: input for codec benchmarks.

weights_before_bf16.bin, weights_after_bf16.bin   all parameters, one optimizer step apart
grads_<n>workers_bf16.bin                         n workers' gradients of the same parameters, before any reduction
activations_bf16.bin                              the output of every block, on rank 0

dtypes/<kind>_<dtype>.bin, of weights, gradients and activations: the same in other dtypes, on rank 0, the first
VALUES_OF_EACH values of every tensor. How they came to be of that dtype:

float32, float16, bfloat16, float64   gradients and activations: computed by a copy of the model in that dtype (float16:
                                      of a loss times LOSS_SCALE, as fp16 training scales it); weights: the trained fp32
                                      ones, rounded to it
float8_e4m3fn, float8_e5m2            the float32 ones, scaled so that the largest of a tensor is the largest of the
                                      dtype, as fp8 training does, and rounded
float32_of_bfloat16, ..._of_float16   the bfloat16 and float16 ones, in float32
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT

VALUES_OF_EACH = 1 << 15
LOSS_SCALE = 1 << 12


def dump(directory: Path, model: torch.nn.Module, tokens: torch.Tensor, step: Callable[[], object]) -> None:
    """`tokens`: this rank's batch for the gradients; `step`: does one optimizer step of the sharded `model`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    directory.mkdir(parents=True, exist_ok=True)
    before = full_weights(model)
    step()
    after = full_weights(model)
    master = full_weights(model, torch.float32)

    # What a worker computes before any reduction FSDP never shows, so an unsharded bf16 copy computes it again.
    computed = computed_in(torch.bfloat16, before, tokens)
    gradients = flat_bytes(computed["gradients"])
    path = directory / f"grads_{world}workers_bf16.bin"
    if rank == 0:
        (directory / "weights_before_bf16.bin").write_bytes(flat_bytes(before.values()))
        (directory / "weights_after_bf16.bin").write_bytes(flat_bytes(after.values()))
        (directory / "activations_bf16.bin").write_bytes(flat_bytes(computed["activations"]))
        path.write_bytes(b"")
        dump_dtypes(directory / "dtypes", master, tokens)
    dist.barrier()
    with path.open("r+b") as file:
        file.seek(rank * len(gradients))
        file.write(gradients)


def dump_dtypes(directory: Path, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> None:
    """`weights`: float32, by name of the parameter."""
    directory.mkdir(exist_ok=True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        for kind, tensors in computed_in(dtype, weights, tokens).items():
            some = [t.detach().flatten()[:VALUES_OF_EACH] for t in tensors]
            save(directory / f"{kind}_{name}.bin", some)
            if dtype in (torch.float16, torch.bfloat16):
                save(directory / f"{kind}_float32_of_{name}.bin", [t.float() for t in some])
            if dtype == torch.float32:
                for small in (torch.float8_e4m3fn, torch.float8_e5m2):
                    scaled = [t * (torch.finfo(small).max / t.abs().max().clamp(min=1e-30)) for t in some]
                    save(directory / f"{kind}_{str(small).removeprefix('torch.')}.bin", [t.to(small) for t in scaled])


def computed_in(
    dtype: torch.dtype, weights: dict[str, torch.Tensor], tokens: torch.Tensor
) -> dict[str, list[torch.Tensor]]:
    """Kind to tensors: a forward and a backward pass of a model whose parameters are of that dtype."""
    model = GPT(context=weights["position"].shape[0]).to(tokens.device, dtype)
    model.load_state_dict(weights)
    activations: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: activations.append(output.detach()))
    scale = LOSS_SCALE if dtype == torch.float16 else 1
    (scale * model(tokens)).backward()
    parameters = list(model.parameters())
    return {"weights": parameters, "gradients": [p.grad for p in parameters], "activations": activations}


def full_weights(model: torch.nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Every parameter, gathered from its shards; by default as the bf16 that FSDP sends."""
    return {name: p.detach().to(dtype).full_tensor() for name, p in model.named_parameters()}


def save(path: Path, tensors: list[torch.Tensor]) -> None:
    path.write_bytes(b"".join(t.contiguous().cpu().view(torch.uint8).numpy().tobytes() for t in tensors))


def flat_bytes(tensors: Iterable[torch.Tensor]) -> bytes:
    flat = torch.cat([t.detach().bfloat16().flatten() for t in tensors])
    return flat.cpu().view(torch.uint8).numpy().tobytes()
