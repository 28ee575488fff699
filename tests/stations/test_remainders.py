from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_patch._stations.remainders import join, split

EXPONENT_OF_NON_FINITE = 0xFF


def finite_bits() -> st.SearchStrategy[int]:
    """Every fp32 bit pattern that is finite, ties between two bf16 values often."""
    patterns = st.integers(0, 2**32 - 1) | st.integers(0, 2**16 - 1).map(lambda high: (high << 16) | 0x8000)
    return patterns.filter(lambda bits: (bits >> 23) & 0xFF != EXPONENT_OF_NON_FINITE)


def from_bits(patterns: list[int]) -> torch.Tensor:
    signed = [bits - 2**32 if bits >= 2**31 else bits for bits in patterns]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


@given(st.lists(finite_bits(), min_size=1, max_size=64))
def test_every_finite_value_comes_back_bit_for_bit(patterns: list[int]) -> None:
    values = from_bits(patterns)
    parameter, remainder = split(values)
    assert parameter.dtype is torch.bfloat16
    assert remainder.dtype is torch.int16
    assert torch.equal(join(parameter, remainder).view(torch.int32), values.view(torch.int32))


@given(st.lists(finite_bits(), min_size=1, max_size=64))
def test_the_parameter_is_the_cast_value_except_on_ties(patterns: list[int]) -> None:
    values = from_bits(patterns)
    parameter, _ = split(values)
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000
    same = parameter.view(torch.int16) == values.bfloat16().view(torch.int16)
    assert bool((same | ties).all())


def test_a_tie_rounds_away_from_zero_where_a_cast_rounds_to_even() -> None:
    tie = from_bits([0x3F808000])  # between 1.0 and the next bf16; 1.0 is the even one
    parameter, _ = split(tie)
    assert tie.bfloat16().item() == 1.0
    assert parameter.item() == 1.0078125


def test_a_bf16_value_has_no_remainder() -> None:
    values = torch.randn(1000).bfloat16().float()
    parameter, remainder = split(values)
    assert torch.equal(parameter, values.bfloat16())
    assert not remainder.any()
