from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_patch._stations import parameters
from mcore_patch._stations.parameters import differing, explains, is_plain, loses, same

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LOSSLESS = {(torch.float32, torch.float64), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)}
LOSSLESS |= {(torch.float16, torch.float64), (torch.bfloat16, torch.float64)} | {(dtype, dtype) for dtype in DTYPES}


@pytest.mark.parametrize("disk, parameter", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_a_pair_of_dtypes_loses_unless_the_second_holds_every_value_of_the_first(
    disk: torch.dtype, parameter: torch.dtype
) -> None:
    assert loses(disk, parameter) is ((disk, parameter) not in LOSSLESS)


def test_dtypes_that_are_no_weights_lose_nothing_that_we_know_of() -> None:
    assert not loses(torch.int32, torch.bfloat16)
    assert not loses(torch.float8_e4m3fn, torch.bfloat16)


@given(st.lists(st.floats(width=32), min_size=1, max_size=50), st.sampled_from([torch.float16, torch.bfloat16]))
def test_a_parameter_is_explained_by_what_was_stored_in_it(values: list[float], dtype: torch.dtype) -> None:
    source = torch.tensor(values, dtype=torch.float32)
    parameter = torch.nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.data.copy_(source)
    assert explains(parameter, source)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50), st.data())
def test_a_parameter_that_was_changed_in_one_element_is_not_explained(values: list[float], data: st.DataObject) -> None:
    source = torch.tensor(values, dtype=torch.float32)
    parameter = torch.nn.Parameter(source.bfloat16())
    index = data.draw(st.integers(0, len(values) - 1))
    bits = parameter.data.view(torch.int16)
    bits[index] ^= data.draw(st.sampled_from([1, 2, 64, -(2**15)]))
    assert not explains(parameter, source)


def test_a_range_of_a_parameter_is_compared_with_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "CHUNK", 7)
    source = torch.randn(10, 10)
    parameter = torch.nn.Parameter(source.bfloat16())
    assert explains(parameter, source.reshape(-1)[20:61], 20, 61)
    assert not explains(parameter, source.reshape(-1)[20:61], 21, 62)


def test_equal_bits_count_and_negative_zero_is_another_value() -> None:
    assert same(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert int(differing(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))) == 1


def test_any_nan_equals_any_other() -> None:
    payloads = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert same(payloads[:1], payloads[1:])
    assert not same(payloads[:1], torch.tensor([1.0]))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2).to_sparse()],
    ids=["meta", "integer", "sparse"],
)
def test_what_cannot_be_a_source_is_not_plain(tensor: torch.Tensor) -> None:
    assert not is_plain(tensor)
    assert is_plain(torch.nn.Parameter(torch.zeros(2)))
