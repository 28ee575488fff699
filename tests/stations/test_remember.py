from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import tiny
import torch

from mcore_patch._stations.remember import Memory, same_memory

needs_swapping = pytest.mark.skipif(not hasattr(torch.utils, "swap_tensors"), reason="swapping has come in torch 2.3")


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.clear()


def parameter(dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=grad)


def hooks() -> int:
    return len(torch.nn.modules.module._global_forward_pre_hooks)


def test_what_a_load_loses_is_remembered_without_a_copy(memory: Memory) -> None:
    kept, loaded = parameter(), torch.randn(4)
    memory.loaded(kept, loaded, "test", name="x")
    source = memory.source(kept)
    assert source is not None
    assert source.tensor.data_ptr() == loaded.data_ptr()
    assert source.untouched
    assert memory.name(kept) == "x"


def test_a_tensor_that_is_written_to_after_the_load_is_not_untouched(memory: Memory) -> None:
    kept, loaded = parameter(), torch.randn(4)
    memory.loaded(kept, loaded, "test", name="x")
    loaded.add_(1)
    source = memory.source(kept)
    assert source is not None
    assert not source.untouched


@pytest.mark.parametrize(
    "tensor",
    [None, 3, torch.randn(5), torch.randn(2, 2), torch.randn(4, device="meta"), torch.arange(4)],
    ids=["nothing", "number", "longer", "reshaped", "meta", "integers"],
)
def test_what_cannot_be_the_parameters_tensor_is_passed_over(memory: Memory, tensor: object) -> None:
    kept = parameter()
    memory.loaded(kept, tensor, "test", name="x")
    assert memory.empty


def test_a_frozen_parameter_is_passed_over(memory: Memory) -> None:
    memory.loaded(parameter(grad=False), torch.randn(4), "test", name="x")
    assert memory.empty


def test_a_load_that_loses_nothing_replaces_one_that_lost(memory: Memory) -> None:
    kept = parameter()
    memory.loaded(kept, torch.randn(4), "test", name="x")
    memory.loaded(kept, torch.zeros(4, dtype=torch.bfloat16), "test", name="x")
    assert memory.source(kept) is None
    exact = memory.known(kept)
    assert exact is not None
    assert exact.dtype is torch.bfloat16
    assert len(memory) == 0


def test_an_fp32_parameter_that_will_be_cast_loses_already(memory: Memory) -> None:
    kept, stays = parameter(torch.float32), parameter(torch.float32)
    memory.loaded(kept, torch.randn(4), "test", name="x", will_be=torch.bfloat16)
    memory.loaded(stays, torch.randn(4), "test", name="y")
    assert memory.source(kept) is not None
    assert memory.source(stays) is None


def test_the_parameters_own_memory_is_copied(memory: Memory) -> None:
    kept = parameter(torch.float32)
    memory.loaded(kept, kept.detach(), "test", name="x", will_be=torch.bfloat16)
    source = memory.source(kept)
    assert source is not None
    assert source.tensor.data_ptr() != kept.data_ptr()


def test_a_stand_in_leads_to_the_original(memory: Memory) -> None:
    kept, original = parameter(), torch.randn(4)
    given = original.bfloat16()
    memory.stands_for(given, original)
    memory.loaded(kept, given, "test", name="x")
    source = memory.source(kept)
    assert source is not None
    assert source.tensor.data_ptr() == original.data_ptr()


def test_a_source_dies_with_its_parameter(memory: Memory) -> None:
    kept, loaded = parameter(), torch.randn(4)
    memory.loaded(kept, loaded, "test", name="x")
    source = memory.source(kept)
    assert source is not None
    alive = weakref.ref(source.tensor)
    del kept, loaded, source
    gc.collect()
    assert alive() is None
    assert memory.empty


def test_the_first_forward_releases_a_models_parameters_and_takes_the_hook_away(memory: Memory) -> None:
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    before = hooks()
    for module in (model, other):
        memory.loaded(module.weight, torch.randn(4, 4, dtype=torch.float64), "test", name="x")
    assert hooks() == before + 1
    model(torch.zeros(1, 4))
    assert memory.source(model.weight) is None
    assert memory.source(other.weight) is not None
    assert hooks() == before + 1
    torch.nn.Sequential(other)(torch.zeros(1, 4))
    assert memory.empty
    assert hooks() == before


def test_a_module_that_ran_before_a_load_is_looked_at_again_after_it(memory: Memory) -> None:
    model = torch.nn.Linear(4, 4)
    keeps_the_hook = parameter()
    memory.loaded(keeps_the_hook, torch.randn(4), "test", name="y")
    model(torch.zeros(1, 4))
    memory.loaded(model.weight, torch.randn(4, 4, dtype=torch.float64), "test", name="x")
    model(torch.zeros(1, 4))
    assert memory.source(model.weight) is None


def test_clearing_takes_the_hook_away(memory: Memory) -> None:
    before = hooks()
    memory.loaded(parameter(), torch.randn(4), "test", name="x")
    memory.clear()
    assert memory.empty
    assert hooks() == before


@needs_swapping
def test_parameters_can_be_swapped_while_they_are_let_go_and_are_known_afterwards(memory: Memory) -> None:
    kept, loaded = parameter(), torch.randn(4)
    memory.loaded(kept, loaded, "test", name="x")
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(kept, parameter())
    with memory.let_go([kept]):
        torch.utils.swap_tensors(kept, parameter())
    assert memory.source(kept) is not None


@needs_swapping
@pytest.mark.usefixtures("_swapping")
def test_a_module_can_be_cast_under_torchs_swapping_flag(memory: Memory) -> None:
    model = torch.nn.Linear(4, 4)
    memory.loaded(model.weight, torch.randn(4, 4, dtype=torch.float64), "test", name="x")
    with memory.let_go(model.parameters()):
        model.bfloat16()
    assert memory.source(model.weight) is not None


@pytest.fixture
def _swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_memory_is_the_same_if_the_dtype_is() -> None:
    for held in (torch.zeros(1), torch.zeros(4)):
        assert same_memory(held, held.detach())
        assert not same_memory(held.view(torch.int32), held)
        assert not same_memory(held.clone(), held)
    assert not same_memory(torch.zeros(0), torch.zeros(0))


def test_a_quantized_tensor_ends_what_an_earlier_load_said(memory: Memory) -> None:
    kept = parameter()
    memory.loaded(kept, torch.randn(4), "test", name="x")
    with tiny.installed():
        memory.loaded(kept, tiny.Float8Tensor(torch.zeros(4)), "test", name="x")
    assert memory.empty
