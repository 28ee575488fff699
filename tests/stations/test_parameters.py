from __future__ import annotations

import itertools

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_patch._stations import parameters
from mcore_patch._stations.parameters import _is_made_of_words, differing, explains, is_plain, loses, loses_in, same

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


def test_nans_of_other_bits_are_the_same_beside_equal_values() -> None:
    left = torch.tensor([0x7FC00000, 0x3F800000, 0x40000000], dtype=torch.int32).view(torch.float32)
    right = torch.tensor([0x7FC00001, 0x3F800000, 0x40000000], dtype=torch.int32).view(torch.float32)
    assert same(left, right)
    assert not same(left, right + 1)


@pytest.mark.parametrize(
    "tensor, words",
    [
        (torch.zeros(2), True),
        (torch.zeros(3), False),
        (torch.zeros(3)[1:], False),
        (torch.zeros(4)[2:], True),
        (torch.zeros(2, 2), False),
        (torch.zeros(4)[::2], False),
        (torch.zeros(4, dtype=torch.bfloat16), True),
        (torch.zeros(6, dtype=torch.bfloat16), False),
        (torch.zeros(8, dtype=torch.bfloat16)[2:6], False),
        (torch.zeros(8, dtype=torch.bfloat16)[4:], True),
        (torch.zeros(3, dtype=torch.float64)[1:], True),
        (torch.zeros(0), True),
    ],
    ids=lambda each: f"{each.dtype} {tuple(each.shape)} from {each.storage_offset()}" if torch.is_tensor(each) else "",
)
def test_a_tensor_is_made_of_words_if_it_begins_and_ends_on_them(tensor: torch.Tensor, words: bool) -> None:
    assert _is_made_of_words(tensor) is words


def test_tensors_are_compared_also_where_only_one_is_made_of_words() -> None:
    values = torch.arange(5.0)
    shifted = torch.cat([torch.zeros(1), values[:4]])[1:]
    assert same(values[:4], shifted)
    assert same(shifted, values[:4])


@pytest.mark.parametrize(
    "disk, held, will_be, expected",
    [
        (torch.float32, torch.float32, None, False),
        (torch.float32, torch.float32, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, None, True),
        (torch.bfloat16, torch.bfloat16, torch.float16, False),
        (torch.bfloat16, torch.float32, torch.bfloat16, False),
        (torch.int64, torch.float32, torch.bfloat16, False),
    ],
    ids=str,
)
def test_what_a_parameter_will_be_cast_to_counts_if_it_is_fp32(
    disk: torch.dtype, held: torch.dtype, will_be: torch.dtype | None, expected: bool
) -> None:
    assert loses_in(disk, torch.zeros(2, dtype=held), will_be) is expected


def test_a_quantized_parameter_always_loses() -> None:
    with tiny.installed():
        held = tiny.Float8Tensor(torch.ones(2))
        assert all(loses_in(disk, held) for disk in (torch.float32, torch.bfloat16, torch.float16))
        assert not loses_in(torch.int64, held)


def test_quantized_values_are_compared_on_the_grid_of_their_scale_in_fp32() -> None:
    with tiny.installed():
        zeros = tiny.Float8Tensor(torch.zeros(3))
        assert parameters.values(zeros).dtype is torch.float32
        half_a_step = tiny.Float8Tensor.SCALE_INV * 2.0**-10
        assert explains(zeros, torch.tensor([0.0, half_a_step * 0.9, -half_a_step]))
        assert not explains(zeros, torch.tensor([0.0, 0.0, half_a_step * 1.1]))
        assert explains(zeros, torch.tensor([half_a_step]), 2)
