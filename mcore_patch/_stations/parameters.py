"""What a single parameter holds, and whether a checkpoint's tensor still explains it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHECKPOINT_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})

# Elements handled at a time: bounds the scratch memory of a check or a write to a few hundred MB.
CHUNK = 1 << 24

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def loses(disk: torch.dtype, parameter: torch.dtype) -> bool:
    """Whether some value of ``disk`` cannot be held by ``parameter``: fp32 -> bf16, but also fp16 -> bf16."""
    if disk not in CHECKPOINT_DTYPES or parameter not in CHECKPOINT_DTYPES:
        return False
    return torch.promote_types(disk, parameter) != parameter


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is an ordinary strided tensor with real data: no subclass, not sparse, not on meta."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.dtype in CHECKPOINT_DTYPES
    )


def chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut ``[start, stop)`` into pieces of at most :data:`CHUNK` elements."""
    for begin in range(start, stop, CHUNK):
        yield begin, min(begin + CHUNK, stop)


def differing(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """How many elements of two tensors of one dtype, shape and device differ in their bits (0-d int64 tensor)."""
    integer = _INTEGER_OF_SIZE[left.element_size()]
    return (left.view(integer) != right.view(integer)).sum()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype, shape and device hold the same bits, any NaN equal to any other.

    NaNs are excepted because a cast keeps their payload on some devices and not on others.
    """
    integer = _INTEGER_OF_SIZE[left.element_size()]
    if torch.equal(left.view(integer), right.view(integer)):
        return True
    unequal = left.view(integer) != right.view(integer)
    return bool((left.isnan() & right.isnan())[unequal].all())


def still_says(parameter: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether ``parameter`` (plain) is bit for bit what storing ``source`` in it gives.

    The whole parameter is compared, not only this rank's shard, so that all data-parallel ranks come to the same
    answer without talking to each other.
    """
    values, held = source.reshape(-1), parameter.detach().reshape(-1)
    return all(
        same(values[a:b].to(device=held.device, dtype=held.dtype), held[a:b]) for a, b in chunks(0, held.numel())
    )
