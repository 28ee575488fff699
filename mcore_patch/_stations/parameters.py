"""What a single parameter holds, and whether a checkpoint's tensor still explains it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mcore_patch._stations import quantized

CHECKPOINT_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})

# Elements handled at a time. On a CPU what still fits its caches; elsewhere what bounds the scratch memory of a check
# or a write to a few hundred MB.
CHUNK = 1 << 19
CHUNK_ON_DEVICE = 1 << 24

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


def chunks(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Cut the elements of ``tensor`` into pieces ``(begin, end)`` of a size that suits its device."""
    size = CHUNK if tensor.device.type == "cpu" else CHUNK_ON_DEVICE
    for begin in range(0, tensor.numel(), size):
        yield begin, min(begin + size, tensor.numel())


def differing(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """How many elements of two tensors of one dtype, shape and device differ in their bits (0-d int64 tensor)."""
    integer = _INTEGER_OF_SIZE[left.element_size()]
    # On a CPU a fifth faster than `!=`, and counting them five times as fast as the sum of a bool tensor.
    return torch.count_nonzero(left.view(integer) ^ right.view(integer))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype, shape and device hold the same bits, any NaN equal to any other.

    NaNs are excepted because a cast keeps their payload on some devices and not on others.
    """
    if _equal_bits(left, right):
        return True
    integer = _INTEGER_OF_SIZE[left.element_size()]
    unequal = left.view(integer) != right.view(integer)
    return bool((left.isnan() & right.isnan())[unequal].all())


def _equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype, shape and device hold the same bits."""
    # By words where that is possible: three times as fast for 16-bit dtypes on a CPU.
    words = _is_made_of_words(left) and _is_made_of_words(right)
    integer = torch.int64 if words else _INTEGER_OF_SIZE[left.element_size()]
    return torch.equal(left.view(integer), right.view(integer))


def _is_made_of_words(tensor: torch.Tensor) -> bool:
    size = tensor.element_size()
    return (
        tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.numel() * size % 8 == 0
        and tensor.storage_offset() * size % 8 == 0
    )


def can_be_compared(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` is plain, or quantized in a way that we can judge."""
    return is_plain(parameter) or quantized.is_known(parameter)


def why_left(parameter: torch.Tensor) -> str:
    """For the report: why the master of a parameter that cannot be compared stays as megatron-core made it."""
    kind = type(parameter)
    return f"{kind.__module__}.{kind.__qualname__}: how it rounds is not known here, so it is left to megatron-core"


def loses_in(disk: torch.dtype, parameter: torch.Tensor, will_be: torch.dtype | None = None) -> bool:
    """Whether storing a tensor of dtype ``disk`` in ``parameter`` loses.

    A quantized parameter always loses. ``will_be`` is the dtype that a parameter which is fp32 now will be cast to.
    """
    if quantized.is_quantized(parameter):
        return disk in CHECKPOINT_DTYPES
    cast_later = will_be is not None and parameter.dtype is torch.float32
    return loses(disk, will_be if cast_later and will_be is not None else parameter.dtype)


def values(parameter: torch.Tensor) -> torch.Tensor:
    """What ``parameter`` holds, flat: its own memory where it is plain, else the dequantized values in fp32."""
    held = quantized.values(parameter) if quantized.is_quantized(parameter) else parameter.detach()
    return held.reshape(-1)


def explains(parameter: torch.Tensor, source: torch.Tensor, start: int = 0, stop: int | None = None) -> bool:
    """Whether ``parameter`` holds, from element ``start`` to ``stop``, what storing the flat ``source`` in it gives.

    Bit for bit where it is plain; where it is quantized, so close that only quantization can be the difference.
    ``source`` has any float dtype and device, and ``stop - start`` elements.
    """
    everything = values(parameter)
    held = everything[start:stop]
    if not quantized.is_quantized(parameter):
        return all(same(source[a:b].to(device=held.device, dtype=held.dtype), held[a:b]) for a, b in chunks(held))
    widest = quantized.largest(everything)
    return all(
        quantized.explained(parameter, held[a:b], source[a:b].to(device=held.device, dtype=torch.float32), widest)
        for a, b in chunks(held)
    )
