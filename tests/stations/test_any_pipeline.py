"""Random models, state dicts, optimizers and events: a master is the checkpoint's value or stock's, never a third.

Which of the two is worked out here from the definition in the README, and not as the package does it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_patch._stations.matching import StateDictMismatchError

pytestmark = pytest.mark.edges

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WIDTH = {torch.float64: (11, 52), torch.float32: (8, 23), torch.float16: (5, 10), torch.bfloat16: (8, 7)}


# ------------------------------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True)
class Spec:
    """One parameter of the model."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    tied_to: int | None


@dataclass(frozen=True)
class Stored:
    """What the state dict has under one name."""

    dtype: torch.dtype
    seed: int
    kind: str
    layout: str
    misshapen: bool = False


@dataclass(frozen=True)
class Event:
    what: str
    index: int = 0
    state: tuple[Stored | None, ...] = ()
    how: str = ""


NAMES = st.sampled_from(["a", "b", "weight", "weight1", "weight10", "module"])
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> list[Spec]:
    paths = draw(st.lists(st.lists(NAMES, min_size=1, max_size=3).map(tuple), min_size=1, max_size=5, unique=True))
    # A name is a module or a parameter, not both.
    paths = [path for path in paths if not any(other != path and other[: len(path)] == path for other in paths)]
    specs: list[Spec] = []
    for index, path in enumerate(paths):
        dtype = draw(st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]))
        tied = draw(st.none() | st.none() | st.integers(0, index - 1)) if index else None
        specs.append(Spec(path, draw(SHAPES), dtype, draw(st.sampled_from([True, True, True, False])), tied))
    return specs


def stored(specs: list[Spec]) -> st.SearchStrategy[tuple[Stored | None, ...]]:
    one = st.builds(
        Stored,
        st.sampled_from([torch.float32, *FLOATS, torch.int64]),
        st.integers(0, 2**20),
        st.sampled_from(["normal", "normal", "exact", "ties", "extreme", "non-finite"]),
        st.sampled_from(["contiguous", "transposed", "strided", "expanded", "leaf"]),
        st.sampled_from([False] * 19 + [True]),
    )
    return st.tuples(*(st.one_of(one, one, one, st.none()) for _ in specs))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[Spec], list[Event], dict[str, Any]]:
    specs = draw(models())
    index = st.integers(0, len(specs) - 1)
    load = st.builds(lambda state: Event("load", state=state), stored(specs))
    distributed = st.builds(
        lambda state, how: Event("distributed load", state=state, how=how),
        stored(specs),
        st.sampled_from(["in place", "in place, then load_state_dict", "without targets", "fully parallel"]),
    )
    given_to_reload = st.builds(
        lambda state, how: Event("reload from", state=state, how=how),
        st.one_of(st.just(()), st.just(()), stored(specs)),
        st.sampled_from(["", "module.", "model", "model0"]),
    )
    other = st.builds(
        Event,
        st.sampled_from(["add", "set", "swap signs", "change the loaded", "reload", "forward", "to", "read", "drop"]),
        index,
    )
    events = [draw(load | distributed), *draw(st.lists(other | load | distributed | given_to_reload, max_size=4))]
    how = draw(
        st.fixed_dictionaries(
            {
                "optimizer": st.sampled_from(["distributed", "distributed", "plain", "precision-aware"]),
                "ranks": st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)]),
                "built": st.integers(0, len(events)),
                "bf16": st.booleans(),
            }
        )
    )
    return specs, events, how


# ------------------------------------------------------------------------------------------------------ what is done


def values(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """fp64 values of a kind: few of them the same in two dtypes, or all; on ties; beyond fp16; not finite."""
    seeded = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=seeded, dtype=torch.float64)
    if kind == "exact":
        return (made * 4).round() / 4
    if kind == "ties":
        return torch.where(made > 0, 1.00390625, 1 + 2.0**-11).to(torch.float64) * made.sign()
    if kind == "extreme":
        return made * 10.0 ** torch.randint(-46, 39, shape, generator=seeded)
    if kind == "non-finite":
        choice = torch.randint(0, 4, shape, generator=seeded)
        for index, special in enumerate((math.nan, math.inf, -math.inf)):
            made = torch.where(choice == index, special, made)
    return made


def tensor(one: Stored, shape: tuple[int, ...]) -> torch.Tensor:
    if one.misshapen:
        shape = (*shape, 2)
    made = values(one.kind, shape, one.seed)
    made = made.nan_to_num(0, 9, -9).clamp(-99, 99).to(one.dtype) if one.dtype is torch.int64 else made.to(one.dtype)
    if one.layout == "transposed" and len(shape) > 1:
        return made.transpose(0, 1).contiguous().transpose(0, 1)
    if one.layout == "strided" and shape:
        return torch.stack([made, made + 1], -1)[..., 0]
    if one.layout == "expanded" and made.numel():
        return made.reshape(-1)[:1].reshape([1] * len(shape)).expand(shape)
    return made.requires_grad_() if one.layout == "leaf" and one.dtype.is_floating_point else made


def build(specs: list[Spec], bf16: bool) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
    model = tiny.MegatronModule(SimpleNamespace(bf16=bf16))
    parameters: list[torch.nn.Parameter] = []
    for index, spec in enumerate(specs):
        module: torch.nn.Module = model
        for part in spec.path[:-1]:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        if spec.tied_to is None:
            value = values("normal", spec.shape, 7 + index).to(spec.dtype)
            parameters.append(torch.nn.Parameter(value, requires_grad=spec.trains))
        else:
            parameters.append(parameters[spec.tied_to])
        module.register_parameter(spec.path[-1], parameters[-1])
    return model, parameters


def expect(source: torch.Tensor | None, parameter: torch.Tensor) -> bool:
    """Whether a load of ``source`` into ``parameter`` loses, and the parameter is what it gave."""
    if source is None or source.dtype not in WIDTH or source.shape != parameter.shape:
        return False
    return loses(source, parameter) and same(source.detach().to(parameter.dtype), parameter.detach())


def loses(source: torch.Tensor, parameter: torch.Tensor) -> bool:
    disk, held = WIDTH[source.dtype], WIDTH[parameter.dtype]
    return disk[0] > held[0] or disk[1] > held[1]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, but for the payload of NaNs."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    a, b = (each.contiguous().reshape(-1) for each in (left, right))
    return bool(((a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())).all())


Result = tuple[list[torch.Tensor], list[tuple[int, int, int, torch.Tensor]], dict[int, torch.Tensor], list[Any]]


def tensors(specs: list[Spec], state: tuple[Stored | None, ...]) -> tiny.Tensors:
    """A state dict."""
    pairs = zip(specs, state, strict=True)
    return {".".join(spec.path): tensor(one, spec.shape) for spec, one in pairs if one is not None}


def on_disk(specs: list[Spec], state: tuple[Stored | None, ...]) -> tiny.Tensors:
    """A checkpoint of tensors that fit, of floats; one that is tied is there once."""
    fitting = tuple(
        None
        if one is None or spec.tied_to is not None
        else replace(one, misshapen=False, dtype=torch.float32 if one.dtype is torch.int64 else one.dtype)
        for spec, one in zip(specs, state, strict=True)
    )
    return {name: each.detach().contiguous() for name, each in tensors(specs, fitting).items()}


def load_distributed(model: torch.nn.Module, how: str) -> None:
    """``dist_checkpointing.load`` of what :data:`tiny.CHECKPOINTS` has, and what pipelines do with it."""
    targets = {name: leaf for name, leaf in model.sharded_state_dict().items() if name in tiny.CHECKPOINTS["disk"]}
    if how == "without targets":
        for leaf in targets.values():
            leaf.data = None
    strategy: Any = tiny.TorchDistLoadShardedStrategy()
    if how == "fully parallel":
        strategy = tiny.FullyParallelLoadStrategyWrapper(strategy)
    loaded = tiny.load_by_name(targets, "disk", strategy)
    if how != "in place":
        model.load_state_dict(loaded, strict=False)


def layout(flat: tiny.Tensors, how: str) -> Any:
    """A state dict as ``reload_model_params`` may get it."""
    return {how: flat} if how.startswith("model") else {how + name: each for name, each in flat.items()}


def run(specs: list[Spec], events: list[Event], how: dict[str, Any], *, stock: bool) -> Result:
    """The model's values; each master with its parameter's index and range; the sources that masters should have.

    A source holds from a load until another load of the parameter, or the first forward of the model, or until the
    masters are written: then the master itself holds.
    """
    model, parameters = build(specs, how["bf16"])
    first = {id(parameter): index for index, parameter in reversed(list(enumerate(parameters)))}
    sources: dict[int, torch.Tensor] = {}
    loaded: list[Any] = []
    last: tiny.Tensors = {}
    raised: list[Any] = []
    optimizer: Any = None
    stale: set[int] = set()

    def construct() -> Any:
        trained = [each for each in parameters if each.requires_grad]
        if how["optimizer"] == "plain":
            return tiny.plain(model) if trained else None
        rank, size = how["ranks"]
        inner = tiny.FusedAdam() if how["optimizer"] == "precision-aware" else None
        return tiny.distributed(model, inner, rank=rank, size=size)

    expected: dict[int, torch.Tensor | None] = {}
    # megatron-core gives these no new value when weights are reloaded, and none is needed where the old one holds.
    keeps = how["optimizer"] == "precision-aware"

    def come(state: tiny.Tensors, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """A load has brought ``state``."""
        for name, parameter in named:
            if name in state and state[name].shape == parameter.shape and state[name].dtype in WIDTH:
                index = first[id(parameter)]
                sources[index] = state[name]
                stale.discard(index)

    def settle() -> None:
        """Masters are made: each has the checkpoint's value where a source holds, or where it held and still does."""
        for index in {first[id(each)] for each in parameters}:
            parameter, source, held = parameters[index], sources.get(index), expected.get(index)
            if index not in stale and expect(source, parameter):
                expected[index] = source.detach().clone()
                continue
            superseded = source is not None and not (keeps and loses(source, parameter))
            if superseded or (held is not None and not expect(held, parameter)):
                expected[index] = None
        sources.clear()
        stale.clear()

    def reload_from(flat: tiny.Tensors, how_laid_out: str) -> None:
        """What upstream does with the state dict differs between releases, so stock gets none."""
        plain = how["optimizer"] == "plain"
        stepped = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        if plain:
            stepped = [(name, each) for name, each in stepped if tiny.is_16_bit(each)]
        try:
            if not stock:
                optimizer.reload_model_params(layout(flat, how_laid_out))
        except StateDictMismatchError:
            # A plain optimizer knows no names but those of loads that were seen.
            assert plain or any(name not in flat or flat[name].shape != each.shape for name, each in stepped)
            optimizer.reload_model_params()
        else:
            come(flat, stepped)
            if stock:
                optimizer.reload_model_params()
        settle()

    names = [".".join(spec.path) for spec in specs]
    bare = {name.removeprefix("module.").removeprefix("module.") for name in names}
    # The names of a model are told apart without the prefixes of wrappers; one of two that are tied brings both.
    can_be_given = len(bare) == len(names) and not (how["optimizer"] == "plain" and len(first) < len(parameters))

    for position, event in enumerate([*events, Event("end")]):
        if position == how["built"]:
            optimizer = construct()
            settle()
        if event.what == "load":
            state = tensors(specs, event.state) | {"no.such.name": torch.ones(2)}
            try:
                model.load_state_dict(state, strict=False)
            except RuntimeError as error:
                raised.append(str(error))
            loaded, last = list(state.values()), state
            come(state, model.named_parameters(remove_duplicate=False))
        elif event.what == "distributed load":
            tiny.CHECKPOINTS["disk"] = last = on_disk(specs, event.state)
            load_distributed(model, event.how)
            loaded = []
            come(last, model.named_parameters(remove_duplicate=False))
        elif event.what == "reload from" and optimizer is not None and can_be_given:
            reload_from(tensors(specs, event.state) if event.state else last, event.how)
        elif event.what in ("add", "set", "swap signs"):
            with torch.no_grad():
                parameter = parameters[event.index]
                if event.what == "add":
                    parameter.add_(1)
                elif event.what == "set" and how["optimizer"] == "precision-aware":
                    parameter.fill_(0.1)  # its shards would stay views of the old memory, and are its masters in stock
                elif event.what == "set":
                    parameter.data = torch.full_like(parameter, 0.1)
                else:
                    parameter.neg_()
        elif event.what == "change the loaded" and loaded:
            target = loaded[event.index % len(loaded)]
            if target.numel() and 0 not in target.stride():
                with torch.no_grad():
                    target.add_(3)
                stale.update(index for index, source in sources.items() if source is target)
        elif event.what == "reload" and optimizer is not None:
            optimizer.reload_model_params()
            settle()
        elif event.what == "forward" and how["optimizer"] != "precision-aware":  # whose masters nobody refreshes then
            forget_on_forward(model)
            sources.clear()
            expected.clear()
        elif event.what == "to":
            model.to("cpu")
        elif event.what == "read":
            model.state_dict()
        elif event.what == "drop":
            loaded, last = [], {}
    if optimizer is not None:
        optimizer.reload_model_params()
        settle()
    held = [each.detach().clone() for each in parameters]
    masters = [] if optimizer is None else list(tiny.masters_of(optimizer))
    found = [(first[id(parameter)], start, stop, main) for parameter, start, stop, main in masters]
    return held, found, {index: each for index, each in expected.items() if each is not None}, raised


def forget_on_forward(model: torch.nn.Module) -> None:
    model.forward = lambda: None
    model()


@pytest.fixture(scope="module", autouse=True)
def _patched() -> Iterator[None]:
    with tiny.installed(), tiny.patched():
        yield


@settings(max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(pipelines())
def test_a_master_is_the_checkpoints_value_or_stocks_and_the_model_is_stocks(
    pipeline: tuple[list[Spec], list[Event], dict[str, Any]],
) -> None:
    tiny.forget()
    with tiny.stock():
        model, stock, _, raised = run(*pipeline, stock=True)
    ours_model, ours, sources, ours_raised = run(*pipeline, stock=False)
    # torch's cast of a NaN without a dimension is 0x7fc0 or 0xffff, by what it has not said (2.13, CPU, stock alone).
    assert all(same(one, other) for one, other in zip(ours_model, model, strict=True))
    assert ours_raised == raised
    for (index, start, stop, main), (*_, stocks) in zip(ours, stock, strict=True):
        if index in sources:
            wanted = sources[index].float().reshape(-1)[start:stop]
            assert same(main, wanted), f"{pipeline[0][index]}: not the checkpoint's value"
        else:
            assert same(main, stocks), f"{pipeline[0][index]}: neither the checkpoint's value nor stock's"
