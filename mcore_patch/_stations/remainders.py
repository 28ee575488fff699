"""How Transformer Engine's FusedAdam splits an fp32 master into a bf16 parameter and a 16-bit remainder.

With ``store_param_remainders`` (TE 2.1+) the parameter *is* the upper half of the master. The upper half is rounded
half away from zero, not half to even as a cast does, so a value exactly between two bf16 numbers can need another
parameter than a load gives it (TransformerEngine v2.10, common/multi_tensor/adam.cu).
"""

from __future__ import annotations

import torch


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 ``values`` -> (bf16 parameter, int16 remainder) of the same shape; exact for every finite value."""
    bits = values.contiguous().view(torch.int32)
    low = bits.to(torch.int16)  # wraps: the low 16 bits, as a signed number
    high = ((bits >> 16) + (low < 0)).to(torch.int16)
    return high.view(torch.bfloat16), low


def join(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master that a bf16 ``parameter`` and its int16 ``remainder`` stand for (inverse of :func:`split`)."""
    high = parameter.contiguous().view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)
