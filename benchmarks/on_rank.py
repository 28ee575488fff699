"""What is measured, from inside a fresh process with one gloo rank. Importing this module imports megatron-core."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mcore_patch._cli import gpt

from .measured import Measured, seconds

Shape = tuple[int, int, int]
"""Layers, hidden size, vocabulary."""


def write(shape: Shape, disk: str, folder: Path) -> None:
    """Write a checkpoint of random weights of dtype *disk* into an empty folder."""
    gpt.initialize_parallel()
    # The bare model's norms are fp32; Float16Module would cast them.
    model = gpt.bare_model(gpt.Size(*shape), getattr(torch, disk)).to(getattr(torch, disk))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    gpt.save(model, str(folder))


def measure(shape: Shape, folder: Path, repeats: int) -> Measured:
    """Load into a bf16 model, reload, step. A reload follows each load, because only then there is work for it."""
    gpt.initialize_parallel()
    model = gpt.bare_model(gpt.Size(*shape), torch.bfloat16)
    optimizer = gpt.build_optimizer(gpt.wrap(model), 1e-4)
    loads, reloads, steps = [], [], []
    # The stand-in for a GPU makes every call on a tensor slower, ours no less than upstream's; loads do not need it.
    with torch._C.DisableTorchFunction():
        peak = _peak_of(lambda: gpt.load(model, str(folder)))
        optimizer.reload_model_params()
        for _ in range(repeats):
            loads.append(seconds(lambda: gpt.load(model, str(folder))))
            reloads.append(seconds(optimizer.reload_model_params))
    for _ in range(repeats + 1):
        for parameter in model.parameters():
            parameter.main_grad.normal_()
        steps.append(seconds(optimizer.step))
    return Measured(
        statistics.median(loads),
        statistics.median(reloads),
        # The first step makes the optimizer's state.
        statistics.median(steps[1:]),
        peak,
        sum(master.numel() for _, master, _ in gpt.masters_of(optimizer)),
    )


def match(parameters: int, ours: bool, repeats: int) -> float | None:
    """Median seconds to find the tensors of so many parameters by name; None if the release cannot do it."""
    from mcore_patch._stations import matching

    chunk = _tiny_module(parameters)
    state = {name: parameter.detach() for name, parameter in chunk.named_parameters()}
    optimizer: Any = object.__new__(DistributedOptimizer)
    optimizer.model_chunks = [chunk]
    optimizer.buffers = [SimpleNamespace(param_to_bucket=dict.fromkeys(chunk.parameters()))]
    if ours:
        return statistics.median(seconds(lambda: matching.match(optimizer, state)) for _ in range(repeats))
    theirs = getattr(optimizer, "_build_model_param_to_state_dict_param_map", None)
    return None if theirs is None else seconds(lambda: theirs(state))


def _tiny_module(parameters: int, per_layer: int = 500) -> torch.nn.Module:
    """So many parameters of one element, with names as long as those of a mixture of experts."""

    def expert() -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_parameter("linear_fc1_weight", torch.nn.Parameter(torch.zeros(1)))
        return module

    layers = torch.nn.ModuleList()
    while parameters > 0:
        experts = torch.nn.ModuleList(expert() for _ in range(min(parameters, per_layer)))
        layers.append(torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"local_experts": experts})}))
        parameters -= per_layer
    return torch.nn.ModuleDict({"decoder": torch.nn.ModuleDict({"layers": layers})})


def _peak_of(work: Callable[[], object]) -> int | None:
    """Bytes by which resident memory rose above what it was before *work*, at its highest; None where Linux says no."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew.
        before = _resident("VmRSS")
    except OSError:
        work()
        return None
    work()
    return _resident("VmHWM") - before


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))
