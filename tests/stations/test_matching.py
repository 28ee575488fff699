from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_patch._stations import matching
from mcore_patch._stations.matching import StateDictMismatchError, match


class Chunk(torch.nn.Module):
    """A model chunk with parameters of any dotted names."""

    def __init__(self, names: list[str], size: int = 2) -> None:
        super().__init__()
        for name in names:
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(last, torch.nn.Parameter(torch.zeros(size)))


def optimizer(monkeypatch: pytest.MonkeyPatch, *chunks: torch.nn.Module, **methods: Any) -> Any:
    monkeypatch.setattr(matching, "_steps", lambda member: [p for c in member.model_chunks for p in c.parameters()])
    return SimpleNamespace(model_chunks=list(chunks), **methods)


def tensors(names: list[str], size: int = 2) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), float(index)) for index, name in enumerate(names)}


EXPERTS = [f"decoder.layers.0.mlp.experts.linear_fc1.weight{index}" for index in range(12)]


@pytest.mark.parametrize("wrappers", ["", "module.", "module.module."])
@pytest.mark.parametrize("layout", ["flat", "model", "model0", "model_0"])
def test_names_find_their_tensors_in_every_layout(monkeypatch: pytest.MonkeyPatch, layout: str, wrappers: str) -> None:
    chunk = Chunk(EXPERTS)
    flat = {wrappers + name: value for name, value in tensors(EXPERTS).items()}
    state: dict[str, Any] = flat if layout == "flat" else {layout: flat, "optimizer": {}, "iteration": 3}
    found = match(optimizer(monkeypatch, chunk), state)
    assert {name: tensor[0].item() for name, _, tensor in found} == dict(zip(EXPERTS, range(12), strict=True))


def test_a_chunk_of_which_nothing_is_stepped_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert match(optimizer(monkeypatch, Chunk([])), {"a": torch.zeros(2)}) == []


def test_weight1_is_not_weight10(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["weight1", "weight10", "weight11"]
    found = match(optimizer(monkeypatch, Chunk(names)), tensors(names))
    assert [tensor[0].item() for _, _, tensor in found] == [0.0, 1.0, 2.0]


def test_one_more_prefix_before_every_key_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"model.language_model.{name}": value for name, value in tensors(EXPERTS).items()}
    assert len(match(optimizer(monkeypatch, Chunk(EXPERTS)), state)) == 12


def test_chunks_get_their_own_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [Chunk(["a"]), Chunk(["a"])]
    state = {"model0": tensors(["a"]), "model1": {"a": torch.ones(2)}}
    found = match(optimizer(monkeypatch, *chunks), state)
    assert [parameter for _, parameter, _ in found] == [chunk.a for chunk in chunks]
    assert [tensor[0].item() for _, _, tensor in found] == [0.0, 1.0]


def test_all_that_is_wrong_is_one_error_that_names_the_first_few(monkeypatch: pytest.MonkeyPatch) -> None:
    state = tensors(EXPERTS[:1], size=3)
    with pytest.raises(StateDictMismatchError) as raised:
        match(optimizer(monkeypatch, Chunk(EXPERTS)), state)
    text = str(raised.value)
    assert "12 of 12" in text
    assert f"{EXPERTS[0]}: (2,) expected, (3,) found" in text
    assert f"{EXPERTS[1]}: (2,) expected, not in the state dict" in text
    assert text.count("; ") == 4
    assert f"not in the state dict; {EXPERTS[2]}: (2,) expected" in text
    assert "(and 7 more). Pass the model's state dict of this rank" in text
    assert isinstance(raised.value, AssertionError), "upstream raises AssertionError"


def test_an_error_about_a_few_counts_all_and_names_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateDictMismatchError) as raised:
        match(optimizer(monkeypatch, Chunk(EXPERTS[:6])), tensors(EXPERTS[:1]))
    text = str(raised.value)
    assert "5 of 6 parameters have no tensor of their shape: " in text
    assert all(f"{name}: (2,) expected, not in the state dict" in text for name in EXPERTS[1:6])
    assert "not in the state dict. Pass" in text, "no more than were named"
    assert "reload_model_params() without it" in text


def test_an_error_about_chunks_says_which_keys_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateDictMismatchError, match=r"3 model chunks need 'model0'.. 'model2' .* found \['a'\]"):
        match(optimizer(monkeypatch, *(Chunk(["a"]) for _ in range(3))), tensors(["a"]))


@pytest.mark.parametrize("state", [{"model0": {}}, {"a": torch.zeros(2)}, {"model": {}}], ids=["one", "flat", "model"])
def test_too_few_chunks_are_an_error(monkeypatch: pytest.MonkeyPatch, state: dict[str, Any]) -> None:
    with pytest.raises(StateDictMismatchError, match=r"model1|model chunks need"):
        match(optimizer(monkeypatch, Chunk(["a"]), Chunk(["a"])), state)


def test_upstreams_own_rewriting_gets_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = Chunk(["weight"], size=4)

    def stack(flat: dict[str, torch.Tensor], given: torch.nn.Module) -> None:
        assert given is chunk
        flat["weight"] = torch.cat([flat.pop("weight0"), flat.pop("weight1")])

    state = tensors(["weight0", "weight1"])
    found = match(optimizer(monkeypatch, chunk, stack=stack), state, ["missing", "stack"])
    assert found[0][2].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert sorted(state) == ["weight0", "weight1"]


def test_what_fits_is_not_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    def rewrite(*_: Any) -> None:
        raise AssertionError

    assert len(match(optimizer(monkeypatch, Chunk(EXPERTS), rewrite=rewrite), tensors(EXPERTS), ["rewrite"])) == 12


@given(st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=4).map(".".join), st.data())
def test_a_name_never_gets_another_names_tensor(name: str, data: st.DataObject) -> None:
    other = data.draw(st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=5).map(".".join))
    with pytest.MonkeyPatch.context() as monkeypatch:
        chunk = Chunk([name])
        if other == name or other.endswith(f".{name}"):
            return
        with pytest.raises(StateDictMismatchError):
            match(optimizer(monkeypatch, chunk), {other: torch.zeros(2)})
