"""Pipelines that do more than load once and reload: run with ``Session.call``, patched, one rank's answer each.

Every function takes the scenario and its checkpoint's folder, and starts from a rank that has only
``torch.distributed``. They answer with plain data, for tests that must not import megatron.
"""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from . import masters as measure
from . import pipeline as p
from .fsdp import under_fsdp as under_fsdp
from .models import (
    Chunks,
    bare_chunks,
    build_optimizer,
    fill,
    initialize_parallel,
    parameters_of,
    train_step,
    wrap_ddp,
    wrap_float16,
)
from .scenario import Scenario


def _patch() -> None:
    import mcore_patch

    mcore_patch.apply(strict=True)


def _model(scenario: Scenario) -> Chunks:
    chunks = bare_chunks(scenario, getattr(torch, scenario.params))
    fill(scenario, chunks, "initialization")
    return wrap_ddp(scenario, wrap_float16(chunks, scenario.mixed))


def _start(scenario: Scenario, folder: Path) -> tuple[p.Truth, Chunks, Any]:
    initialize_parallel(scenario)
    truth = p.read_truth(scenario, folder)
    _patch()
    chunks = _model(scenario)
    return truth, chunks, build_optimizer(scenario, chunks, getattr(torch, scenario.params))


def _differing(optimizer: Any, chunks: Chunks, truth: p.Truth) -> int:
    return sum(master.differing for master in measure.masters_vs_truth(optimizer, chunks, truth))


def _as_model(chunks: Chunks) -> p.Truth:
    return {(chunk, name): parameter.detach().float() for chunk, name, parameter in parameters_of(chunks)}


def _memory() -> Any:
    from mcore_patch._stations.remember import memory

    return memory


def reload_twice(scenario: Scenario, folder: Path) -> list[int]:
    """Elements that differ after one reload, and after another one with no load in between."""
    truth, chunks, optimizer = _start(scenario, folder)
    p.load(scenario, folder, chunks)
    differing = []
    for _ in range(2):
        optimizer.reload_model_params()
        differing.append(_differing(optimizer, chunks, truth))
    return differing


def reload_after_forward(scenario: Scenario, folder: Path) -> int:
    """Elements that differ from the model after a reload that comes when training has begun."""
    _, chunks, optimizer = _start(scenario, folder)
    p.load(scenario, folder, chunks)
    optimizer.reload_model_params()
    _forward(chunks)
    optimizer.reload_model_params()
    return _differing(optimizer, chunks, _as_model(chunks))


def _forward(chunks: Chunks) -> None:
    tokens = torch.arange(16).view(1, 16)
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    with torch.no_grad():
        for chunk in chunks:
            chunk(tokens, tokens, mask)


def second_load(scenario: Scenario, folder: Path, other: Scenario, other_folder: Path) -> dict[str, int]:
    """Load one checkpoint, then another, then reload: elements that differ from each, and from the model."""
    first, chunks, optimizer = _start(scenario, folder)
    second = p.read_truth(other, other_folder)
    p.load(scenario, folder, chunks)
    p.load(other, other_folder, chunks)
    optimizer.reload_model_params()
    wanted = {"first": first, "second": second, "model": _as_model(chunks)}
    return {name: _differing(optimizer, chunks, truth) for name, truth in wanted.items()}


def two_optimizers(scenario: Scenario, folder: Path) -> list[int]:
    """Weights, then an optimizer, then another one over the same model: elements that differ in each."""
    initialize_parallel(scenario)
    truth = p.read_truth(scenario, folder)
    _patch()
    chunks = _model(scenario)
    p.load(scenario, folder, chunks)
    differing = []
    for _ in range(2):
        optimizer = build_optimizer(scenario, chunks, getattr(torch, scenario.params))
        differing.append(_differing(optimizer, chunks, truth))
    return differing


def lifetime(scenario: Scenario, folder: Path, end: str) -> tuple[int, int]:
    """Remembered tensors that are alive when the pipeline has dropped what it loaded, and after ``end``.

    ``end``: "reload", "forward", "load" (another load replaces them), or "death" of the model.
    """
    _, chunks, optimizer = _start(scenario, folder)
    p.load(scenario, folder, chunks)
    alive = [weakref.ref(known.tensor) for known in _memory()._known if hasattr(known, "tensor")]
    gc.collect()
    remembered = sum(reference() is not None for reference in alive)
    if end == "reload":
        optimizer.reload_model_params()
    elif end == "forward":
        _forward(chunks)
    elif end == "load":
        for _, _, parameter in parameters_of(chunks):
            _memory().loaded(parameter, parameter.detach().clone(), "another load", name="?")
    elif end == "death":
        del optimizer
        chunks.clear()
    gc.collect()
    return remembered, sum(reference() is not None for reference in alive)


def _own_names(chunk: Any) -> list[str]:
    return [name for name, _ in p.unwrapped(chunk).named_parameters()]


def collectives(scenario: Scenario, folder: Path, patched: bool) -> dict[str, int]:
    """How often each collective was called by load, reload and optimizer construction."""
    initialize_parallel(scenario)
    truth = p.read_truth(scenario, folder)
    if patched:
        _patch()
    names = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "gather_object", "scatter", "barrier")
    names += ("all_gather_into_tensor", "_all_gather_base", "reduce_scatter_tensor", "broadcast_object_list", "reduce")
    calls: Counter[str] = Counter()
    for name in names:
        if hasattr(torch.distributed, name):
            _count(name, calls)
    p.build_and_load(scenario, "patched" if patched else "stock", folder, truth)
    return dict(calls)


def _count(name: str, calls: Counter[str]) -> None:
    import torch.distributed.distributed_c10d as c10d

    function = getattr(c10d, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    for module in (c10d, torch.distributed):
        setattr(module, name, counted)


def frozen(scenario: Scenario, folder: Path) -> tuple[int, int]:
    """With every second parameter frozen: elements of the others' masters that differ; frozen ones remembered."""
    initialize_parallel(scenario)
    truth = p.read_truth(scenario, folder)
    _patch()
    chunks = bare_chunks(scenario, getattr(torch, scenario.params))
    fill(scenario, chunks, "initialization")
    for index, (_, _, parameter) in enumerate(parameters_of(chunks)):
        parameter.requires_grad_(index % 2 == 0)
    chunks = wrap_ddp(scenario, wrap_float16(chunks))
    optimizer = build_optimizer(scenario, chunks, getattr(torch, scenario.params))
    p.load(scenario, folder, chunks)
    known = [_memory().source(q) for _, _, q in parameters_of(chunks) if not q.requires_grad]
    optimizer.reload_model_params()
    return _differing(optimizer, chunks, truth), sum(source is not None for source in known)


def layouts(scenario: Scenario, folder: Path, layout: str) -> int:
    """Elements that differ after ``reload_model_params(state_dict=...)`` with the state dict in some layout."""
    truth, chunks, optimizer = _start(scenario, folder)
    loaded = p.load(scenario, folder, chunks)
    if layout == "flat":
        loaded = dict(loaded["model"])
    elif layout == "model_0":
        loaded = {f"model_{index}": loaded[key] for index, key in enumerate(p._keys(chunks))}
    elif layout == "module.":
        loaded = {key: {f"module.{name}": value for name, value in loaded[key].items()} for key in p._keys(chunks)}
    elif layout == "prefix":
        loaded = {f"model.language_model.{name}": value for name, value in loaded["model"].items()}
    before = {key: set(value) for key, value in loaded.items() if isinstance(value, dict)}
    optimizer.reload_model_params(state_dict=loaded)
    assert before == {key: set(value) for key, value in loaded.items() if isinstance(value, dict)}, "it was changed"
    return _differing(optimizer, chunks, truth)


def mismatch(scenario: Scenario, folder: Path) -> str:
    """What ``reload_model_params(state_dict=...)`` says of one missing name and one wrong shape; masters untouched."""
    _, chunks, optimizer = _start(scenario, folder)
    loaded = p.load(scenario, folder, chunks)
    before = [master.clone() for _, master, _ in measure.masters_of(optimizer)]
    flat = dict(loaded["model"])
    names = _own_names(chunks[0])
    del flat[names[0]]
    flat[names[1]] = torch.zeros(3, 5)
    try:
        optimizer.reload_model_params(state_dict=flat)
    except AssertionError as error:
        after = [master for _, master, _ in measure.masters_of(optimizer)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "a master was touched"
        return f"{names[0]}|{names[1]}|{error}"
    return "no error"


def bad_input(scenario: Scenario, folder: Path, what: str, patched: bool) -> tuple[str, list[str]]:
    """The exception (or a digest of the model) that a bad checkpoint or state dict leads to, and our WARNINGs."""
    initialize_parallel(scenario)
    if patched:
        import mcore_patch

        mcore_patch.apply()
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_patch").addHandler(handler)
    chunks = _model(scenario)
    optimizer = build_optimizer(scenario, chunks, getattr(torch, scenario.params))
    try:
        if what == "no such directory":
            p.load(scenario, folder / "nowhere", chunks)
        elif what == "empty directory":
            (folder / "empty").mkdir(exist_ok=True)
            p.load(scenario, folder / "empty", chunks)
        else:
            loaded = p.load(scenario, folder, chunks)
            state = dict(loaded["model"])
            _spoil(state, _own_names(chunks[0]), what)
            p.unwrapped(chunks[0]).load_state_dict(state, strict=what != "missing")
        optimizer.reload_model_params()
    except Exception as error:
        return type(error).__name__, heard
    digests = measure.model_snapshot(chunks)
    masters = [str(hash(master.numpy().tobytes())) for _, master, _ in measure.masters_of(optimizer)]
    return repr(sorted(digests.items())) + ("" if what in ("non-finite", "non-contiguous") else repr(masters)), heard


def _spoil(state: dict[str, Any], names: list[str], what: str) -> None:
    name = next(name for name in names if state[name].dim() == 2)
    value = state[name].detach().clone()
    if what == "extra":
        state["unknown.weight"] = torch.zeros(2)
    elif what == "missing":
        del state[name]
    elif what == "shape":
        state[name] = value[:, :-1]
    elif what == "non-contiguous":
        state[name] = value.t().contiguous().t()
    elif what == "meta":
        state[name] = value.to("meta")
    elif what == "non-finite":
        value[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
        state[name] = value


def non_finite(scenario: Scenario, folder: Path) -> int:
    """A checkpoint with NaN and infinities: elements of the masters that are not its bits."""
    truth, chunks, optimizer = _start(scenario, folder)
    loaded = p.load(scenario, folder, chunks)
    state = dict(loaded["model"])
    name = next(name for name in _own_names(chunks[0]) if state[name].dim() == 2)
    _spoil(state, [name], "non-finite")
    p.unwrapped(chunks[0]).load_state_dict(state)
    truth[0, name] = state[name].float()
    optimizer.reload_model_params()
    return _differing(optimizer, chunks, truth)


def remembered_after_load(scenario: Scenario, folder: Path) -> int:
    """How many tensors are remembered after a load."""
    _, chunks, _ = _start(scenario, folder)
    p.load(scenario, folder, chunks)
    return len(_memory())


def reverted(scenario: Scenario, folder: Path) -> int:
    """Elements that differ from the checkpoint when the patch is taken back before the load."""
    import mcore_patch

    truth, chunks, optimizer = _start(scenario, folder)
    mcore_patch.revert()
    p.load(scenario, folder, chunks)
    optimizer.reload_model_params()
    return _differing(optimizer, chunks, truth)


def log_lines(scenario: Scenario, folder: Path) -> list[tuple[str, str]]:
    """Level and text of what ``mcore_patch`` logs for a load and a reload."""
    lines: list[tuple[str, str]] = []
    _, chunks, optimizer = _start(scenario, folder)
    logger = logging.getLogger("mcore_patch")
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    p.load(scenario, folder, chunks)
    optimizer.reload_model_params()
    return lines


def template_is_untouched(scenario: Scenario, folder: Path) -> bool:
    """Whether the caller's ShardedTensors hold their own targets and dtypes again after a load."""
    _, chunks, _ = _start(scenario, folder)
    state = p._keyed(chunks, p._sharded_state)
    leaves = [leaf for _, leaf in _leaves(state) if hasattr(leaf, "local_shape")]
    before = [(leaf.dtype, copy.copy(leaf.data)) for leaf in leaves]
    dist_checkpointing.load(state, str(folder))
    return all(
        leaf.dtype == dtype and leaf.data.data_ptr() == data.data_ptr() and leaf.data.dtype == dtype
        for leaf, (dtype, data) in zip(leaves, before, strict=True)
    )


def _leaves(tree: Any) -> Any:
    from mcore_patch._stations.load import leaves

    return leaves(tree)


def out_of_memory(scenario: Scenario, folder: Path, reading: bool) -> tuple[int, bool, list[str]]:
    """Wider targets are too much for memory: elements unlike the model, the model as in stock, our WARNINGs.

    Every rank fails to make one; or, with ``reading``, the first rank to read into it, which torch tells all ranks.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.planner import LoadItemType

    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_patch").addHandler(handler)
    truth, chunks, optimizer = _start(scenario, folder)
    init_data, read_data = ShardedTensor.init_data, FileSystemReader.read_data
    failed: list[str] = []

    def failing_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.dtype is torch.float32:
            raise torch.cuda.OutOfMemoryError("no memory for this")
        init_data(self, *args, **kwargs)

    def failing_read(self: Any, plan: Any, planner: Any) -> Any:
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]  # 0.19 reads objects so, too
        if torch.distributed.get_rank() == 0 and tensors and not failed:
            failed.append("once")
            raise MemoryError
        return read_data(self, plan, planner)

    if reading:
        FileSystemReader.read_data = failing_read
    else:
        ShardedTensor.init_data = failing_init
    p.load(scenario, folder, chunks)
    optimizer.reload_model_params()
    as_stock = all(torch.equal(q, truth[chunk, name].to(q.dtype)) for chunk, name, q in parameters_of(chunks))
    return _differing(optimizer, chunks, _as_model(chunks)), as_stock, heard


# ------------------------------------------------------------------------------------ optimizers, see test_optimizers


def after_training(scenario: Scenario, folder: Path, patched: bool) -> int:
    """Elements that differ after a step, a weights-only load and a reload: nothing may be left of the step."""
    initialize_parallel(scenario)
    truth = p.read_truth(scenario, folder)
    if patched:
        _patch()
    chunks = _model(scenario)
    optimizer = build_optimizer(scenario, chunks, getattr(torch, scenario.params))
    train_step(chunks, optimizer)
    _forward(chunks)
    p.load(scenario, folder, chunks)
    optimizer.reload_model_params()
    return _differing(optimizer, chunks, truth)


def after_a_step(scenario: Scenario, folder: Path, patched: bool) -> list[int]:
    """A digest of each master after load, reload and a step; unpatched, with masters that were set by hand."""
    initialize_parallel(scenario)
    truth = p.read_truth(scenario, folder)
    if patched:
        _patch()
    chunks = _model(scenario)
    optimizer = build_optimizer(scenario, chunks, getattr(torch, scenario.params))
    p.load(scenario, folder, chunks)
    optimizer.reload_model_params()
    if not patched:
        names = {id(parameter): (chunk, name) for chunk, name, parameter in parameters_of(chunks)}
        for parameter, master, start in measure.masters_of(optimizer):
            master.data.copy_(
                truth[names[id(parameter)]].reshape(-1)[start : start + master.numel()].view(master.shape)
            )
    train_step(chunks, optimizer)
    return [hash(master.detach().numpy().tobytes()) for _, master, _ in measure.masters_of(optimizer)]


def subclassed(scenario: Scenario, folder: Path) -> tuple[int, list[str]]:
    """With users' subclasses of all optimizer classes: elements that differ, and who is said to hold the masters."""
    import megatron.core.optimizer as package

    import mcore_patch

    initialize_parallel(scenario)
    truth = p.read_truth(scenario, folder)
    _patch()
    for name in ("DistributedOptimizer", "Float16OptimizerWithFloat16Params", "ChainedOptimizer"):
        setattr(package, name, type(f"Users{name}", (getattr(package, name),), {}))
    chunks = _model(scenario)
    optimizer = build_optimizer(scenario, chunks, getattr(torch, scenario.params))
    assert type(optimizer).__name__.startswith("Users") or scenario.optimizer == "layer-wise"
    p.load(scenario, folder, chunks)
    optimizer.reload_model_params()
    return _differing(optimizer, chunks, truth), sorted({record.held_by for record in mcore_patch.report()})


def stranger(scenario: Scenario, folder: Path) -> tuple[Any, int, list[tuple[str, str]]]:
    """A chain with an optimizer of a user's own class, reloaded with a state dict.

    What that one was given (which keys), elements of the others that differ, what the report says of its parameters.
    """
    from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

    import mcore_patch

    class Users(MegatronOptimizer):
        given: Any = None
        is_stub_optimizer = False

        def reload_model_params(self, state_dict: Any = None) -> None:
            self.given = state_dict

    Users.__abstractmethods__ = frozenset()
    truth, chunks, optimizer = _start(scenario, folder)
    own = torch.nn.Parameter(torch.zeros(3))
    users = Users(torch.optim.SGD([own]), *_config_of(optimizer, Users))
    chain = ChainedOptimizer([*measure.optimizers_of(optimizer), users])
    loaded = p.load(scenario, folder, chunks)
    chain.reload_model_params(state_dict=loaded)
    said = [(record.held_by, record.reason) for record in mcore_patch.report() if record.held_by == "Users"]
    return users.given is loaded, _differing(optimizer, chunks, truth), said


def _config_of(optimizer: Any, cls: Any) -> list[Any]:
    """The arguments after the first that a MegatronOptimizer of this release is made with."""
    import inspect

    values = {"config": measure.optimizers_of(optimizer)[0].config, "init_state_fn": lambda *_: None}
    return [values.get(name) for name in list(inspect.signature(cls.__init__).parameters)[2:]]


def more_exact_state_dict(scenario: Scenario, folder: Path) -> tuple[int, int]:
    """The pipeline loads a state dict that it cut to 16 bits, and reloads with the whole one: elements that differ.

    From the checkpoint, and how many names the optimizer was told (a check of the test: 0 for the plain optimizer).
    """
    truth, chunks, optimizer = _start(scenario, folder)
    whole = p.load(scenario, folder, chunks)
    dtype = getattr(torch, scenario.params)
    for key, chunk in zip(p._keys(chunks), chunks, strict=True):
        cut = {name: value.to(dtype) if value is not None else None for name, value in whole[key].items()}
        p.unwrapped(chunk).load_state_dict(cut)
    optimizer.reload_model_params(state_dict=whole)
    return _differing(optimizer, chunks, truth), len(getattr(optimizer, "model_chunks", ()))


def names_unknown(scenario: Scenario, folder: Path) -> str:
    """The error of a reload with a state dict where no load was seen that could have told the names."""
    _, chunks, optimizer = _start(scenario, folder)
    whole = torch.load(p._rank_file(folder), weights_only=False)
    with torch.no_grad():
        for key, (_, name, parameter) in zip(["model"] * 99, parameters_of(chunks), strict=False):
            parameter.copy_(whole[key][name])
    try:
        optimizer.reload_model_params(state_dict=whole)
    except AssertionError as error:
        return str(error)
    return "no error"


def remembered_by_layer_wise(scenario: Scenario, folder: Path, then: str) -> tuple[int, int]:
    """Remembered tensors before and after masters are written, where half of the masters are on another rank."""
    initialize_parallel(scenario)
    _patch()
    chunks = _model(scenario)
    optimizer = None
    if then != "build":
        optimizer = build_optimizer(scenario, chunks, getattr(torch, scenario.params))
    p.load(scenario.but(then="nothing"), folder, chunks)
    before = len(_memory())
    if optimizer is None:
        optimizer = build_optimizer(scenario, chunks, getattr(torch, scenario.params))
    elif then == "reload":
        optimizer.reload_model_params()
    else:
        optimizer.load_state_dict(optimizer.state_dict())
    return before, len(_memory())


def untouched(scenario: Scenario, folder: Path) -> tuple[int, int, int]:
    """For parameters that are their own masters: tensors remembered, records made, masters that are no parameters."""
    import mcore_patch

    _, chunks, optimizer = _start(scenario, folder)
    p.load(scenario, folder, chunks)
    remembered = len(_memory())
    optimizer.reload_model_params()
    of_model = {parameter.untyped_storage().data_ptr() for _, _, parameter in parameters_of(chunks)}
    masters = [master for _, master, _ in measure.masters_of(optimizer) if master.dtype is torch.float32]
    return remembered, len(mcore_patch.report()), sum(m.untyped_storage().data_ptr() not in of_model for m in masters)


def mimo(scenario: Scenario, folder: Path) -> tuple[int, int, int]:
    """Elements that differ under a MimoOptimizer after a reload, and after one with a state dict of the whole model.

    One module trains on these ranks, another one elsewhere. And the number of optimizers here.
    """
    from megatron.core.models.mimo.optimizer import MimoOptimizer, ModuleOptimizerInfo

    truth, chunks, optimizer = _start(scenario, folder)
    here = ModuleOptimizerInfo(optimizer, None, None, True)
    elsewhere = ModuleOptimizerInfo(None, None, None, False)
    whole = MimoOptimizer({"language": here, "images": elsewhere}, measure.optimizers_of(optimizer)[0].config)
    loaded = p.load(scenario, folder, chunks)
    whole.reload_model_params()
    after_reload = _differing(optimizer, chunks, truth)
    named = {f"language_model.{name}": value for name, value in loaded["model"].items()}
    whole.reload_model_params({**named, "images.projection.weight": torch.zeros(2)})
    return after_reload, _differing(optimizer, chunks, truth), len(whole._active_optimizers)
