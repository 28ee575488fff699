"""The masters of any optimizer, found without help of the package under test, against what they should be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from .models import Chunks, parameters_of, unwrapped
from .scenario import Master


def optimizers_of(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [leaf for child in chained for leaf in optimizers_of(child)]


def masters_of(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
    """(parameter, master, first element of the flat parameter that the master holds) for each master on this rank.

    An fp32 parameter's master is the parameter, or a view of it.
    """
    for part in optimizers_of(optimizer):
        if isinstance(part, DistributedOptimizer):
            yield from _of_distributed(part)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            yield from _pairs(part.float16_groups, part.fp32_from_float16_groups)
            yield from _pairs(part.fp32_from_fp32_groups, part.fp32_from_fp32_groups)
        else:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, parameter, 0


def _pairs(parameters: Any, masters: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
    for group, main_group in zip(parameters, masters, strict=True):
        for parameter, master in zip(group, main_group, strict=True):
            yield parameter, master, 0


def _of_distributed(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
    kinds = [(part.model_fp32_groups, part.shard_fp32_groups)]
    if getattr(part.config, "use_precision_aware_optimizer", False):
        kinds.append((part.model_float16_groups, part.shard_float16_groups))
    else:
        kinds.append((part.model_float16_groups, part.shard_fp32_from_float16_groups))
    # HybridDeviceOptimizer steps on copies of the shards that the distributed optimizer knows.
    copies = getattr(part.optimizer, "param_to_inner_param", {})
    for parameters, masters in kinds:
        for group, main_group in zip(parameters, masters, strict=True):
            for parameter, master in zip(group, main_group, strict=True):
                yield parameter, copies.get(master, master), part._get_model_param_range_map(parameter)["param"].start


def masters_vs_truth(optimizer: Any, chunks: Chunks, truth: dict[tuple[int, str], torch.Tensor]) -> list[Master]:
    """Every master on this rank, with the number of its elements whose bits are not the truth's."""
    named = {id(parameter): (chunk, name) for chunk, name, parameter in parameters_of(chunks)}
    found = []
    for parameter, master, start in masters_of(optimizer):
        chunk, name = named[id(parameter)]
        value = master.detach().float().reshape(-1)
        expected = truth[chunk, name].reshape(-1)[start : start + value.numel()]
        differing = int((value.view(torch.int32) != expected.view(torch.int32)).sum())
        found.append(Master(torch.distributed.get_rank(), chunk, name, value.numel(), differing))
    return found


def model_snapshot(chunks: Chunks) -> dict[str, str]:
    """A digest of the bytes, dtype and shape of every parameter and buffer, by ``chunk:name``."""
    snapshot = {}
    for index, chunk in enumerate(chunks):
        module = unwrapped(chunk)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
            snapshot[f"{index}:{name}"] = hashlib.sha256(head + raw).hexdigest()
    return snapshot
