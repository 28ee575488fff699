"""What a rank of the demo does: write a checkpoint; load it, count the masters that differ from it, and train.

Importing this module imports megatron-core: the stand-ins of ``mcore_patch.testing`` have to be there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import gpt
from .demo_cases import Case, Run, Trained

_SIZE = gpt.Size(layers=2, hidden=64, vocabulary=256)
_BATCH = 4
_LEARNING_RATE = 3e-4

_Values = dict[str, torch.Tensor]
"""Parameter name -> what lies on disk for it, in fp32 (which holds every bf16 value as well)."""


def write(case: Case, folder: Path) -> int:
    """Write the checkpoint, and beside it what megatron-core reads there; returns the number of elements.

    It is read back by a fp32 model, which rounds nothing, in this process, which is not patched.
    """
    gpt.initialize_parallel()
    model = gpt.bare_model(_SIZE, getattr(torch, case.disk))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # New biases and norms are zeros and ones, which lose nothing; those of a trained model are anything.
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    _checkpoint(folder).mkdir()
    gpt.save(model, str(_checkpoint(folder)))

    reader = gpt.bare_model(_SIZE, torch.float32)
    gpt.load(reader, str(_checkpoint(folder)))
    values: _Values = {name: parameter.detach() for name, parameter in gpt.parameters_of(reader).items()}
    torch.save(values, _values(folder))
    return sum(value.numel() for value in values.values())


def train(case: Case, folder: Path, run: Run, steps: int) -> Trained:
    """Load the checkpoint, look at the masters, train for *steps* steps. Every rank returns the same."""
    gpt.initialize_parallel()
    model = gpt.bare_model(_SIZE, getattr(torch, case.parameters))
    wrapped = gpt.wrap(model)
    optimizer = gpt.build_optimizer(wrapped, _LEARNING_RATE)
    gpt.load(model, str(_checkpoint(folder)))
    optimizer.reload_model_params()

    pairs = list(_masters_and_values(model, optimizer, torch.load(_values(folder))))
    if run == "never rounded":
        for master, value in pairs:
            master.copy_(value)
    counts = torch.tensor([[master.numel(), _differing(master, value)] for master, value in pairs]).sum(0)
    torch.distributed.all_reduce(counts)
    masters, differing = counts.tolist()
    return Trained(masters, differing, tuple(_step(wrapped, optimizer, step) for step in range(steps)))


def _checkpoint(folder: Path) -> Path:
    return folder / "checkpoint"


def _values(folder: Path) -> Path:
    return folder / "values.pt"


def _masters_and_values(model: Any, optimizer: Any, values: _Values) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each master on this rank and what lies on disk for its elements, both flat."""
    names = {id(parameter): name for name, parameter in gpt.parameters_of(model).items()}
    for parameter, master, start in gpt.masters_of(optimizer):
        yield master.detach().view(-1), values[names[id(parameter)]].view(-1)[start : start + master.numel()]


def _differing(left: torch.Tensor, right: torch.Tensor) -> int:
    """Elements of two fp32 tensors whose bits differ."""
    return int((left.view(torch.int32) != right.view(torch.int32)).sum())


def _step(wrapped: Any, optimizer: Any, step: int) -> float:
    """One training step, each rank on its part of the data; the loss before it, as the mean over all ranks."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tokens = _batch(step * world_size + rank)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(_SIZE.sequence).expand_as(inputs)
    hidden_from_each = torch.ones(_SIZE.sequence, _SIZE.sequence).triu(1).bool()[None, None]

    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    loss = wrapped(inputs, positions, hidden_from_each, labels=labels).float().mean()
    loss.backward()
    wrapped.finish_grad_sync()
    optimizer.step()

    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    return float(total) / world_size


def _batch(index: int) -> torch.Tensor:
    """Sequences that can be learned: each counts up from a random token, in strides of a random size."""
    generator = torch.Generator().manual_seed(index)
    start = torch.randint(_SIZE.vocabulary, (_BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (_BATCH, 1), generator=generator)
    return (start + stride * torch.arange(_SIZE.sequence + 1)) % _SIZE.vocabulary
