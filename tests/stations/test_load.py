"""The parts of a load at the precision on disk, one by one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.distributed.checkpoint as checkpoint

from mcore_patch._stations import load
from mcore_patch._stations.load import dtypes_on_disk
from mcore_patch._stations.remember import memory


class Strategy:
    """Reads metadata as megatron-core does, and with a torch whose tensors keep what torch.empty() does not take."""

    def load_tensors_metadata(self, _: Any) -> dict[str, torch.Tensor]:
        return {"w": torch.empty(2, strides=(1,))}  # type: ignore[call-overload, no-any-return]


@pytest.mark.skipif(not hasattr(checkpoint, "save"), reason="saving without ranks has come in torch 2.2")
def test_dtypes_on_disk_are_found_where_the_strategy_cannot_tell_them(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2), "b": torch.ones(3, dtype=torch.bfloat16)}
    checkpoint.save(tensors, storage_writer=checkpoint.FileSystemWriter(tmp_path))
    with pytest.raises(TypeError, match="strides"):
        Strategy().load_tensors_metadata(tmp_path)
    assert dtypes_on_disk(Strategy(), tmp_path) == {"w": torch.float32, "b": torch.bfloat16}


# ----------------------------------------------------------------------------------------------- which targets may lose


def parameter(dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(4, 3, dtype=dtype), requires_grad=grad)


def leaf(data: torch.Tensor | None, **more: Any) -> Any:
    made = tiny.ShardedTensor("key", torch.zeros(2, dtype=torch.bfloat16) if data is None else data)
    vars(made).update({"data": data, **more})
    return made


@pytest.mark.parametrize(
    "target, may",
    [
        (leaf(parameter()), True),
        (leaf(parameter(torch.float16)), True),
        (leaf(parameter()[1:]), True),
        (leaf(torch.zeros(2, dtype=torch.bfloat16)), True),
        (leaf(None), True),
        (leaf(None, dtype=torch.float32), False),
        (leaf(None, dtype=torch.int16), False),
        (leaf(None, flattened_range=slice(0, 1)), False),
        (leaf(parameter(torch.float32)), False),
        (leaf(parameter(grad=False)), False),
        (leaf(parameter(grad=False)[1:]), False),
        (leaf(torch.zeros(2, dtype=torch.bfloat16, device="meta")), False),
        (leaf(tiny.Float8Tensor(torch.ones(2))), False),
        (SimpleNamespace(data=None, dtype=torch.bfloat16, local_shape=(2,)), True),
        (SimpleNamespace(data=parameter(), dtype=torch.bfloat16), False),
        (torch.zeros(2, dtype=torch.bfloat16), False),
    ],
    ids=[
        *("bf16", "fp16", "a view", "no parameter", "no data", "no data fp32", "no data int16", "flattened", "fp32"),
        *("frozen", "a view of a frozen one", "meta", "quantized", "no ranges", "a factory", "a plain tensor"),
    ],
)
def test_a_target_may_lose_if_it_has_16_bits_and_trains(target: Any, may: bool) -> None:
    assert load._may_lose(target) is may


def test_only_what_loses_is_read_at_the_dtype_on_disk(patched: None) -> None:
    tiny.CHECKPOINTS["disk"] = {"wide": torch.ones(2), "integers": torch.ones(2, dtype=torch.int64)}
    tiny.CHECKPOINTS["disk"] |= {"same": torch.ones(2, dtype=torch.bfloat16), "half": torch.ones(2).half()}
    state = {key: tiny.ShardedTensor(key, torch.zeros(2, dtype=torch.bfloat16)) for key in tiny.CHECKPOINTS["disk"]}
    state["flat"] = leaf(torch.zeros(2, dtype=torch.bfloat16), key="wide", flattened_range=slice(0, 2))
    loaded = tiny.TorchDistLoadShardedStrategy().load(state, "disk")
    assert {key: each.dtype for key, each in loaded.items()} == {
        "wide": torch.float32,
        "integers": torch.bfloat16,
        "same": torch.bfloat16,
        "half": torch.float16,
        "flat": torch.bfloat16,
    }
    assert {each.dtype for each in state.values()} == {torch.bfloat16}
    assert load._load.has_widened is True
    tiny.TorchDistLoadShardedStrategy().load({"same": state["same"]}, "disk")
    assert load._load.has_widened is False


def test_a_load_is_the_callers_call(patched: None) -> None:
    calls: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "loaded"

    reader = tiny.TorchDistLoadShardedStrategy()
    tiny.CHECKPOINTS["disk"] = {"wide": torch.ones(2), "same": torch.ones(2, dtype=torch.bfloat16)}
    for key in tiny.CHECKPOINTS["disk"]:
        state = {key: tiny.ShardedTensor(key, torch.zeros(2, dtype=torch.bfloat16))}
        assert load.through_strategy(original, reader, state, "disk", (1,), {"two": 2}) == "loaded"
        assert calls.pop() == ((reader, state, "disk", 1), {"two": 2})


def test_a_load_that_is_done_again_is_stocks_in_what_it_calls_as_well(patched: None) -> None:
    reader = tiny.TorchDistLoadShardedStrategy()
    tiny.CHECKPOINTS["disk"] = {"wide": torch.ones(2)}
    seen: list[Any] = []

    def original(_: Any, state: Any, folder: str) -> Any:
        seen.append(state)
        if len(seen) == 1:
            raise MemoryError
        return tiny.TorchDistLoadShardedStrategy().load(state, folder)

    state = {"wide": tiny.ShardedTensor("wide", torch.zeros(2, dtype=torch.bfloat16))}
    assert load.through_strategy(original, reader, state, "disk", (), {})["wide"].dtype is torch.bfloat16


# -------------------------------------------------------------------------------------------------- what a load brought

TREE = {"a": 1, "b": [2, (3, {"c": 4})]}
PATHS = {("a",): 1, ("b", 0): 2, ("b", 1, 0): 3, ("b", 1, 1, "c"): 4}


def test_leaves_are_found_with_their_paths_and_again_by_them() -> None:
    assert dict(load.leaves(TREE)) == PATHS
    for path, value in PATHS.items():
        assert load._at(TREE, path) == value


@pytest.mark.parametrize(
    "path",
    [("x",), ("b", 2), ("b", "a"), ("a", 0), ("a", "x"), ("b", 1, 1, "c", "d")],
    ids=["no such key", "beyond a list", "a name in a list", "an index in a leaf", "a name in a leaf", "below a leaf"],
)
def test_a_path_that_leads_nowhere_is_nothing(path: tuple[Any, ...]) -> None:
    assert load._at(TREE, path) is None


def test_parameters_are_found_in_what_holds_them_and_not_where_they_are_leaves_themselves() -> None:
    one, other = parameter(), parameter()
    factory = SimpleNamespace(data=other)
    state = {"model": {"one": leaf(one), "list": [factory, leaf(torch.zeros(2))]}, "bare": one, "number": 3}
    found = [(each.path, each.parameter) for each in load.targets(state)]
    assert [path for path, _ in found] == [("model", "one"), ("model", "list", 0)]
    assert [each for _, each in found] == [one, other]


def test_a_load_that_begins_has_widened_nothing() -> None:
    load._load.has_widened = True
    load.targets({})
    assert load._load.has_widened is False


def test_an_fp32_parameter_among_16_bit_ones_will_be_cast_like_them(patched: None) -> None:
    narrow, norm = parameter(), parameter(torch.float32)
    for state, remembered in ({"w": leaf(narrow), "norm": leaf(norm)}, True), ({"norm": leaf(norm)}, False):
        memory.clear()
        found = load.targets({"model": state})
        load.remember(found, {"model": {key: torch.ones(4, 3) for key in state}}, "disk")
        assert (memory.source(norm) is not None) is remembered
        assert memory.name(norm) == "model.norm"


def quantized() -> Any:
    return torch.nn.Parameter(tiny.Float8Tensor(torch.ones(4, 3)))


def test_behind_a_scratch_target_of_the_nominal_dtype_the_pipeline_gets_that_dtype_back(patched: None) -> None:
    """0.14 to 0.18, and behind a factory: the target is no shard of ours, so we may have widened what was read."""
    first, second, third = quantized(), quantized(), quantized()
    found = [
        load.Target(("model", key), SimpleNamespace(data=each), each)
        for key, each in (("gone", first), ("second", second), ("third", third))
    ]
    original = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    exact = original.bfloat16()
    for widened in (True, False):
        memory.clear()
        loaded = {"model": {"second": original, "third": exact}}
        load._load.has_widened = widened
        load.remember(found, loaded, "disk")
        assert loaded["model"]["third"] is exact
        nominal = loaded["model"]["second"]
        assert nominal.dtype is (torch.bfloat16 if widened else torch.float32)
        source = memory.source(second)
        assert source is not None
        assert torch.equal(source.tensor, original)
        # The pipeline's own load_state_dict comes with what it was given.
        memory.loaded(second, nominal, "load_state_dict", name="second")
        source = memory.source(second)
        assert source is not None
        assert torch.equal(source.tensor, original)
        assert memory.known(first) is None


@pytest.mark.skipif(not hasattr(checkpoint, "save"), reason="saving without ranks has come in torch 2.2")
def test_a_quantized_target_is_read_beside_the_load_also_where_nothing_else_happens(
    patched: None, tmp_path: Path
) -> None:
    held, plain = quantized(), parameter()
    values = {"held": torch.randn(4, 3), "plain": torch.randn(4, 3)}
    checkpoint.save(values, storage_writer=checkpoint.FileSystemWriter(tmp_path))
    state = {"held": tiny.ShardedTensor("held", held), "plain": tiny.ShardedTensor("plain", plain)}
    found = load.targets(state)
    given = {"held": held.detach(), "plain": values["plain"]}
    load.remember(found, given, tmp_path)
    for name, each in (("held", held), ("plain", plain)):
        source = memory.source(each)
        assert source is not None
        assert torch.equal(source.tensor, values[name])
        assert (source.origin, source.name) == ("dist_checkpointing.load", name)
