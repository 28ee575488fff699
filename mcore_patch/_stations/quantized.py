"""Parameters of Transformer Engine's quantized classes: recognise them, read them, tell whether a tensor explains them.

Nothing here imports Transformer Engine: where it is not imported, there are no such parameters. Values are read with
``.float()`` only. ``.to(float32)``, ``.dequantize()`` and ``float32.copy_(parameter)`` go through the nominal dtype and
round to bf16 on the way (all of TE 1.0 to 2.20; the last until 2.13).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

# Where the base classes of quantized tensors stand: of all in TE 2.0 and later; the only one before; and that of the
# weights of several experts in one (TE 2.14 and later), which derives from neither and may hold plain values, too.
_BASES = (
    ("transformer_engine.pytorch.tensor", "QuantizedTensor"),
    ("transformer_engine.pytorch.float8_tensor", "Float8Tensor"),
    ("transformer_engine.pytorch.tensor.grouped_tensor", "GroupedTensor"),
)

# Classes whose `.float()` and whose rounding are known from the source. The others are left to megatron-core:
# NVFP4Tensor, whose steps are so wide that the bound of `explained` could not tell an edit from rounding;
# GroupedTensor, whose `.float()` rounds to the nominal dtype; HybridQuantizedTensor and IdentityTensor (2.19 and later,
# experimental), in which a recipe of the user's own puts any of them; what releases newer than 2.20 may add.
_KNOWN = frozenset({"Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor"})

# Half the distance between neighbours, relative to the lower end of their binade, of E4M3 (3 bits) and E5M2 (2 bits).
_HALF_STEP_E4M3 = 2.0**-4
_HALF_STEP_E5M2 = 2.0**-3
_SMALLEST_NORMAL_E4M3 = 2.0**-6
_LARGEST_E4M3 = 448.0


def is_quantized(tensor: object) -> bool:
    """Whether ``tensor`` is of one of Transformer Engine's quantized classes (any, also one that we do not know)."""
    bases = (getattr(sys.modules.get(module), name, None) for module, name in _BASES)
    return any(isinstance(base, type) and isinstance(tensor, base) for base in bases)


def is_known(tensor: object) -> bool:
    """Whether ``tensor`` is of a quantized class whose values and rounding we can judge."""
    return is_quantized(tensor) and any(cls.__name__ in _KNOWN for cls in type(tensor).__mro__)


def values(tensor: torch.Tensor) -> torch.Tensor:
    """The quantized values in fp32, in the tensor's shape, without rounding to the nominal dtype."""
    return tensor.detach().float()


def largest(held: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude in ``held``, 0-d."""
    magnitude = held.abs()
    return torch.where(magnitude.isfinite(), magnitude, 0).max()


def explained(quantized: torch.Tensor, held: torch.Tensor, source: torch.Tensor, widest: torch.Tensor) -> bool:
    """Whether only quantization can be the difference between ``source`` and the values ``held``.

    ``held`` is (a part of) ``values(quantized)``, ``source`` of its shape, device and fp32, ``widest`` the
    :func:`largest` of all of ``values(quantized)``. Each element has to be within half a step of the fp8 grid at
    ``held``, plus 2**-8 of the source, which covers the rounding to bf16 that some releases do before they quantize.
    With one scale for the tensor the step follows from it; with a scale per block (MXFP8, blockwise) the step is taken
    to be the widest there can be. Where the scale is delayed, and so may be stale, the largest value that it can hold
    stands for every larger one. A NaN may have been an infinity.
    Another tensor, a permutation or a change of every element by 1 % exceeds this somewhere; a change below the step
    is invisible in the parameter itself.
    """
    scale_inv = getattr(quantized, "_scale_inv", None)
    half_step = _HALF_STEP_E5M2 if "E5M2" in str(getattr(quantized, "_fp8_dtype", "")) else _HALF_STEP_E4M3
    magnitude = held.abs()
    saturated = torch.zeros_like(held, dtype=torch.bool)
    if isinstance(scale_inv, torch.Tensor) and scale_inv.numel() == 1 and half_step == _HALF_STEP_E4M3:
        scale = scale_inv.detach().to(device=held.device, dtype=torch.float32)
        grid = (magnitude / scale).clamp_min(_SMALLEST_NORMAL_E4M3)
        tolerance = torch.exp2(torch.floor(torch.log2(grid * (1 + 2.0**-20)))) * half_step * scale
        if "CurrentScaling" not in type(getattr(quantized, "_quantizer", None)).__name__:
            limit = _LARGEST_E4M3 * scale * (1 - 2.0**-20)
            saturated = (magnitude >= limit) & (source.abs() >= limit) & (held.sign() == source.sign())
    else:
        # The smallest step of a block is at most 2**-9 of a 224th of its largest value (scales are powers of two).
        tolerance = magnitude * half_step + widest * (2.0**-9 / 224)
    close = (held - source).abs() <= tolerance + source.abs() * 2.0**-8
    both_undefined = held.isnan() & ~source.isfinite()
    return bool((close | saturated | both_undefined).all())


def drop_spent_initial_values(parameters: Any) -> None:
    """Take away the accessors of initial values that are gone, so that an optimizer can be built once more.

    Transformer Engine (2.2+) leaves ``get_high_precision_init_val`` on a parameter after its value was cleared;
    megatron-core (0.9 to 0.19.2) takes the accessor for the value, and fails with ``None.view``.
    """
    for parameter in parameters:
        get = getattr(parameter, "get_high_precision_init_val", None)
        if get is not None and get() is None:
            del parameter.get_high_precision_init_val, parameter.clear_high_precision_init_val
