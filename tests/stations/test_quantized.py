"""Quantized parameters without Transformer Engine: the bound on its plain formulas, and classes that are left alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mcore_patch._stations import load, masters
from mcore_patch._stations.parameters import can_be_compared
from mcore_patch._stations.quantized import drop_spent_initial_values, explained, is_known, is_quantized, largest
from mcore_patch._stations.remember import memory
from mcore_patch._stations.report import MasterRecord, reporter

# ----------------------------------------------------------------------------------------------------------- the bound

Held = tuple[Any, torch.Tensor]
Quantize = Callable[[torch.Tensor], Held]


def _fp8(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def one_scale(scale: float) -> Quantize:
    """As Float8Tensor: delayed scaling has any scale, also a stale one; current scaling takes the amax to 448."""

    def quantize(source: torch.Tensor) -> Held:
        inverse = torch.tensor([scale]).reciprocal()
        return SimpleNamespace(_scale_inv=inverse, _fp8_dtype="DType.kFloat8E4M3"), _fp8(source * scale) * inverse

    return quantize


def current_scaling(source: torch.Tensor) -> Held:
    amax = float(source.abs().max())
    quantized, held = one_scale(448 / amax if amax else 1.0)(source)
    quantized._quantizer = type("Float8CurrentScalingQuantizer", (), {})()
    return quantized, held


def blocks(size: int) -> Quantize:
    """As MXFP8Tensor (32 elements) and Float8BlockwiseQTensor: for each block, the power of two that reaches 448."""

    def quantize(source: torch.Tensor) -> Held:
        rows = torch.nn.functional.pad(source, (0, -source.numel() % size)).view(-1, size)
        amax = rows.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
        inverse = torch.exp2(torch.ceil(torch.log2(amax / 448)))
        return SimpleNamespace(_fp8_dtype="DType.kFloat8E4M3"), (_fp8(rows / inverse) * inverse).view(-1)[
            : source.numel()
        ]

    return quantize


RECIPES = {
    "delayed, scale 1": one_scale(1.0),
    "delayed, stale and small": one_scale(0.37),
    "delayed, stale and large": one_scale(3000.0),
    "tensorwise": current_scaling,
    "mxfp8": blocks(32),
    "blockwise": blocks(128),
}
# What tensors hold: values of many magnitudes, and zeros.
WEIGHTS = st.builds(
    lambda seed, spread, scale: (
        torch.randn(256, generator=torch.Generator().manual_seed(seed))
        * 10.0 ** (torch.rand(256, generator=torch.Generator().manual_seed(seed + 1)) * -spread)
        * scale
    ),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 3.0, 8.0]),
    st.sampled_from([1e-3, 1.0, 300.0, 1e5]),
)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("through", [torch.float32, torch.bfloat16], ids=str)
@given(source=WEIGHTS)
@settings(max_examples=40, deadline=None)
def test_quantization_alone_stays_within_the_bound(recipe: str, through: torch.dtype, source: torch.Tensor) -> None:
    source[::50] = 0
    quantized, held = RECIPES[recipe](source.to(through).float())
    assert explained(quantized, held, source, largest(held))


@pytest.mark.parametrize("recipe", [name for name in RECIPES if "block" not in name and name != "mxfp8"])
@given(source=WEIGHTS, index=st.integers(0, 255))
@settings(max_examples=40, deadline=None)
def test_with_one_scale_a_value_two_steps_away_exceeds_it(recipe: str, source: torch.Tensor, index: int) -> None:
    quantized, held = RECIPES[recipe](source)
    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * quantized._scale_inv
    place = int(torch.searchsorted(grid, held[index].abs()))
    assume(place + 2 < len(grid))
    for neighbour in (place + 2, place - 2):
        changed = source.clone()
        changed[index] = grid[neighbour].copysign(held[index]) if neighbour >= 0 else -held[index] - grid[1]
        assert not explained(quantized, held, changed, largest(held))


@pytest.mark.parametrize("recipe", RECIPES)
def test_another_tensor_a_permutation_and_edits_exceed_it(recipe: str) -> None:
    generator = torch.Generator().manual_seed(1)
    source, other = (torch.randn(4096, generator=generator) * 0.05 for _ in range(2))
    quantized, held = RECIPES[recipe](source)
    assert explained(quantized, held, source, largest(held))
    one = source.clone()
    one[torch.where(source.abs() < 0.1, source.abs(), 0).argmax()] *= 1.15
    for changed in (other, source.roll(1), source.flip(0), source * 1.01, -source, one, torch.zeros_like(source)):
        assert not explained(quantized, held, changed, largest(held))


def test_only_a_delayed_scale_lets_the_largest_value_stand_for_all_that_are_larger() -> None:
    source = torch.linspace(-1, 1, 256)
    for recipe, saturates in (("delayed, stale and large", True), ("tensorwise", False)):
        quantized, held = RECIPES[recipe](source)
        larger = source.clone()
        larger[-1] *= 3
        assert explained(quantized, held, larger, largest(held)) is saturates
        larger[-1] *= -1
        assert not explained(quantized, held, larger, largest(held))


def test_what_is_not_a_number_explains_only_itself() -> None:
    quantized, held = one_scale(1.0)(torch.ones(4))
    held[1] = torch.nan
    assert explained(quantized, held, torch.tensor([1.0, torch.nan, 1.0, 1.0]), largest(held))
    assert not explained(quantized, held, torch.ones(4), largest(held))
    assert not explained(quantized, held, torch.tensor([torch.nan, torch.nan, 1.0, 1.0]), largest(held))


# ------------------------------------------------------------------------------- classes that are left to megatron-core

LEFT = {
    "NVFP4Tensor": "transformer_engine.pytorch.tensor.nvfp4_tensor",
    "HybridQuantizedTensor": "transformer_engine.pytorch.tensor.hybrid_tensor",
    "IdentityTensor": "transformer_engine.pytorch.tensor.identity_tensor",
    "GroupedTensor": "transformer_engine.pytorch.tensor.grouped_tensor",
    "Float2Tensor": "transformer_engine.pytorch.tensor.of_a_release_to_come",
}


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> type[torch.Tensor]:
    """A class of Transformer Engine's name and module, under its base where it has one; nothing may read its values."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"the values of a {name} were read")

    tensors, grouped = ModuleType("tensor"), ModuleType("grouped_tensor")
    base = type("QuantizedTensor", (torch.Tensor,), {})
    tensors.QuantizedTensor = base  # type: ignore[attr-defined]
    body = {"__module__": LEFT[name], "float": refuse, "dequantize": refuse, "view": refuse, "reshape": refuse}
    cls = type(name, (torch.Tensor if name == "GroupedTensor" else base,), body)
    grouped.GroupedTensor = cls if name == "GroupedTensor" else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.tensor", tensors)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.tensor.grouped_tensor", grouped)
    return cls


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    memory.clear()
    reporter.clear()


def written(parameter: torch.nn.Parameter, main: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> MasterRecord:
    """The record of ``main``, the master of ``parameter`` in an optimizer of megatron-core's class."""
    module = ModuleType("optimizer")
    cls = type("Float16OptimizerWithFloat16Params", (), {})
    module.Float16OptimizerWithFloat16Params = cls  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer.optimizer", module)
    optimizer: Any = cls()
    optimizer.float16_groups, optimizer.fp32_from_float16_groups = [[parameter]], [[main]]
    masters.write(optimizer, "reload_model_params", masters.keep_settled(optimizer), reloaded=True)
    (record,) = reporter.records()
    return record


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", LEFT)
def test_a_class_whose_rounding_is_not_known_is_left_alone_and_the_report_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(8, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(values.as_subclass(stand_in(name, monkeypatch)))
    assert is_quantized(parameter)
    assert not is_known(parameter)
    assert not can_be_compared(parameter)
    main = torch.full((8,), 0.5)
    memory.loaded(parameter, torch.randn(8), "load_state_dict", name="weight")
    record = written(parameter, main, monkeypatch)
    assert torch.equal(main, torch.full((8,), 0.5))
    assert (record.source, record.changed) == ("model", 0)
    assert record.reason == f"{LEFT[name]}.{name}: how it rounds is not known here, so it is left to megatron-core"


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", LEFT)
def test_what_a_load_at_disk_precision_brings_for_it_gets_the_dtype_that_stock_loads(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    values = torch.zeros(8, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(values.as_subclass(stand_in(name, monkeypatch)))
    on_disk = torch.randn(8)
    loaded = {"weight": on_disk}
    # Since 0.14 the target of a quantized parameter is a plain tensor of the nominal dtype, which was widened.
    leaf = SimpleNamespace(data=values, local_shape=(8,))
    monkeypatch.setattr(load._load, "has_widened", True)
    load.remember([load.Target(("weight",), leaf, parameter)], loaded, tmp_path)
    assert loaded["weight"].dtype is torch.bfloat16
    assert torch.equal(loaded["weight"], on_disk.bfloat16())
    assert memory.empty


@pytest.mark.usefixtures("clean")
def test_names_that_transformer_engine_gives_to_something_else_are_not_taken_for_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = ModuleType("transformer_engine.pytorch.tensor")
    changed.QuantizedTensor = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, changed.__name__, changed)
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert not is_quantized(parameter)
    assert can_be_compared(parameter)


def test_the_largest_value_is_that_of_the_finite_ones() -> None:
    assert largest(torch.tensor([float("inf"), float("nan"), -0.5, 0.25])) == 0.5
    assert largest(torch.tensor([float("inf")])) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_of_e5m2_is_twice_one_of_e4m3(dtype: torch.dtype) -> None:
    held = torch.tensor([1.0, 64.0])
    for fp8, factor in (("DType.kFloat8E4M3", 1.06), ("DType.kFloat8E5M2", 1.11)):
        parameter: Any = SimpleNamespace(_scale_inv=torch.ones(1, dtype=dtype), _fp8_dtype=fp8)
        assert explained(parameter, held, held * factor, largest(held))
        assert not explained(parameter, held, held * factor * 1.1, largest(held))


def test_saturated_values_stand_for_all_beyond_them_and_for_no_others() -> None:
    parameter: Any = SimpleNamespace(_scale_inv=torch.tensor([0.5]), _fp8_dtype="DType.kFloat8E4M3")
    held = torch.tensor([224.0, -224.0])
    assert explained(parameter, held, torch.tensor([1e6, -224.0]), largest(held))
    assert not explained(parameter, held, torch.tensor([-1e6, -224.0]), largest(held))
    assert not explained(parameter, held / 2, torch.tensor([1e6, -112.0]), largest(held))


def test_accessors_of_initial_values_go_with_the_values() -> None:
    def parameter(value: torch.Tensor | None) -> Any:
        return SimpleNamespace(get_high_precision_init_val=lambda: value, clear_high_precision_init_val=lambda: None)

    spent, whole, plain = parameter(None), parameter(torch.ones(2)), SimpleNamespace()
    drop_spent_initial_values([spent, whole, plain])
    assert vars(spent) == {}
    assert sorted(vars(whole)) == ["clear_high_precision_init_val", "get_high_precision_init_val"]
