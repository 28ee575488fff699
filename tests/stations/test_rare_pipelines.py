"""What few pipelines do: the branches that no other test of the stations takes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from pipelines import Float4Tensor, in_fp16
from torch.distributed.checkpoint.api import CheckpointException

import mcore_patch
from mcore_patch._stations import disk, guard, modules, optimizers, parameters
from mcore_patch._stations import load as load_module
from mcore_patch._stations import masters as masters_module
from mcore_patch._stations.matching import StateDictMismatchError
from mcore_patch._stations.remember import memory
from mcore_patch._stations.report import MasterRecord, Reporter, summary
from mcore_patch._stations.verify import VerificationError

pytestmark = [pytest.mark.edges, pytest.mark.usefixtures("patched")]


class Model(tiny.MegatronModule):
    """Two parameters."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, **config: bool) -> None:
        super().__init__(SimpleNamespace(**config))
        self.first = torch.nn.Parameter(torch.ones(3, 2, dtype=dtype))
        self.register_parameter("none", None)
        self.second = torch.nn.Parameter(torch.ones(5, dtype=dtype))


def values(**more: torch.Tensor) -> tiny.Tensors:
    seeded = torch.Generator().manual_seed(1)
    return {"first": torch.randn(3, 2, generator=seeded), "second": torch.randn(5, generator=seeded), **more}


def masters(optimizer: Any) -> list[torch.Tensor]:
    return [main for *_, main in tiny.masters_of(optimizer)]


def load(state: Any, **how: Any) -> Any:
    return tiny.load_by_name(state, "disk", **how)


def same(optimizer: Any, wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(main, each.reshape(-1)) for main, each in zip(masters(optimizer), wanted, strict=True))


def reasons() -> set[str]:
    return {record.reason for record in mcore_patch.report()}


def test_a_strict_pipeline_gets_our_errors() -> None:
    mcore_patch.apply(strict=True, only=["module_load_state_dict", "module_leaf_load"])
    with pytest.raises(ZeroDivisionError), guard.standing_aside("dividing"):
        raise ZeroDivisionError
    mcore_patch.apply()
    with guard.standing_aside("dividing"):
        raise ZeroDivisionError
    assert guard._said == {"dividing"}
    guard._said.clear()


def test_an_error_of_the_load_itself_reaches_the_pipeline_and_targets_are_as_before() -> None:
    model = Model()
    tiny.CHECKPOINTS["disk"] = values()
    state = model.sharded_state_dict()
    del tiny.CHECKPOINTS["disk"]["second"]
    with pytest.raises(KeyError, match="second"):
        load(state)
    assert state["first"].data is model.first
    assert state["first"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.cuda.OutOfMemoryError(),
        CheckpointException("read", {3: (MemoryError(), None)}),  # type: ignore[dict-item]
        CheckpointException("read", {0: (KeyError(), None), 3: (MemoryError(), None)}),  # type: ignore[dict-item]
    ],
    ids=["host", "device", "torch, on a rank", "torch, on one of the ranks that failed"],
)
def test_a_load_that_runs_out_of_memory_is_stocks(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    tiny.CHECKPOINTS["disk"] = values()
    tiny.TOO_WIDE["second"] = error
    loaded = load(model.sharded_state_dict())
    assert all(each.dtype is torch.bfloat16 for each in loaded.values())
    assert torch.equal(model.second, values()["second"].bfloat16())
    assert ["out of memory while loading disk" in each.getMessage() for each in caplog.records] == [True]


@pytest.mark.parametrize(
    "error",
    [KeyError("gone"), CheckpointException("read", {0: (KeyError("gone"), None)})],  # type: ignore[dict-item]
    ids=["of the strategy", "of torch"],
)
def test_a_load_that_fails_otherwise_fails(error: Exception) -> None:
    model = Model()
    tiny.CHECKPOINTS["disk"] = values()
    tiny.TOO_WIDE["second"] = error
    with pytest.raises((KeyError, CheckpointException)) as raised:
        load(model.sharded_state_dict())
    assert raised.value is error


@pytest.mark.parametrize("kind", ["fully parallel", "zarr"])
def test_out_of_memory_is_an_error_where_a_load_cannot_be_done_again(kind: str) -> None:
    """Ranks have exchanged tensors, or leaves have been replaced."""
    model = Model()
    tiny.CHECKPOINTS["disk"] = values()
    tiny.TOO_WIDE["second"] = MemoryError()
    parallel = tiny.FullyParallelLoadStrategyWrapper(tiny.TorchDistLoadShardedStrategy())
    how = parallel if kind == "fully parallel" else tiny.TensorStoreLoadShardedStrategy()
    with pytest.raises(MemoryError):
        load(model.sharded_state_dict(), sharded_strategy=how)


def test_a_load_that_is_done_again_is_the_same_call() -> None:
    calls: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        if len(calls) == 1:
            raise MemoryError
        return "loaded"

    tiny.CHECKPOINTS["disk"] = values()
    reader, state = tiny.TorchDistLoadShardedStrategy(), Model().sharded_state_dict()
    assert load_module.through_strategy(original, reader, state, "disk", (1,), {"two": 2}) == "loaded"
    assert calls == [((reader, state, "disk", 1), {"two": 2})] * 2


def test_what_a_strategy_makes_itself_is_left_to_it_and_the_others_get_targets_of_the_dtype_on_disk() -> None:
    state = values(first=values()["first"].double())
    seen: dict[str, list[Any]] = {}

    def original(reader: Any, targets: Any, _: str) -> Any:
        seen[type(reader).__name__] = [each.data for each in targets.values()]
        return {}

    tiny.CHECKPOINTS["disk"] = state
    for reader, own in ((tiny.TorchDistLoadShardedStrategy(), True), (tiny.TensorStoreLoadShardedStrategy(), False)):
        model = Model()
        with torch.no_grad():
            load_module.through_strategy(original, reader, model.sharded_state_dict(), "disk", (), {}, own_targets=own)
    assert seen["TorchDistLoadShardedStrategy"] == [None, None]
    assert [each.dtype for each in seen["TensorStoreLoadShardedStrategy"]] == [torch.float64, torch.float32]
    assert [each.shape for each in seen["TensorStoreLoadShardedStrategy"]] == [(3, 2), (5,)]


def test_where_the_outer_strategy_cannot_widen_the_inner_one_does_not() -> None:
    """On another rank the outer one may have failed as well, or not: what is exchanged has to fit."""

    class Flaky(tiny.TorchDistLoadShardedStrategy):
        """Knows the dtypes at the second try."""

        asked = 0

        def load_tensors_metadata(self, checkpoint_dir: str) -> dict[str, Any]:
            self.asked += 1
            if self.asked == 1:
                raise OSError
            return super().load_tensors_metadata(checkpoint_dir)

    tiny.CHECKPOINTS["disk"] = values()
    loaded = load(Model().sharded_state_dict(), sharded_strategy=tiny.FullyParallelLoadStrategyWrapper(Flaky()))
    assert {each.dtype for each in loaded.values()} == {torch.bfloat16}
    assert guard._said == {"loading at disk precision"}
    guard._said.clear()


def test_a_target_without_data_gets_the_dtype_on_disk() -> None:
    model = Model()
    tiny.CHECKPOINTS["disk"] = values(first=values()["first"].half())
    state = model.sharded_state_dict()
    for leaf in state.values():
        leaf.data = None
    state["exact"] = tiny.ShardedTensor("exact", torch.zeros(2, dtype=torch.bfloat16))
    state["wide"] = tiny.ShardedTensor("wide", torch.zeros(2))
    tiny.CHECKPOINTS["disk"] |= {"exact": torch.ones(2, dtype=torch.bfloat16), "wide": torch.ones(2)}
    loaded = load(state)
    assert [loaded[name].dtype for name in state] == [torch.float16, torch.float32, torch.bfloat16, torch.float32]
    model.load_state_dict({name: loaded[name] for name in ("first", "second")})
    assert same(tiny.distributed(model), [values()["first"].half().float(), values()["second"]])


def test_a_load_of_wide_targets_is_left_alone() -> None:
    model = Model(torch.float32)
    tiny.CHECKPOINTS["disk"] = values()
    model.load_state_dict(load(model.sharded_state_dict()))
    assert torch.equal(model.first, values()["first"])


def test_parameters_in_lists_are_found_again_and_what_is_gone_is_passed_over() -> None:
    model = Model()
    optimizer = tiny.distributed(model)
    tiny.CHECKPOINTS["disk"] = values()

    class Forgets(tiny.TorchDistLoadShardedStrategy):
        """Returns other containers than it was given."""

        def load(self, sharded_state_dict: Any, checkpoint_dir: str) -> Any:
            super().load(sharded_state_dict, checkpoint_dir)
            return {"list": sharded_state_dict["list"][:1], "other": 3}

    state = model.sharded_state_dict()
    load({"list": [state["first"], state["second"]], "other": {"deep": state["second"]}}, sharded_strategy=Forgets())
    optimizer.reload_model_params()
    assert masters(optimizer)[0].numel() == 6


def test_a_frozen_quantized_parameter_is_not_read_once_more() -> None:
    class Drops(tiny.TorchDistLoadShardedStrategy):
        """Returns nothing for it."""

        def load(self, sharded_state_dict: Any, checkpoint_dir: str) -> Any:
            loaded = super().load(sharded_state_dict, checkpoint_dir)
            return {name: each for name, each in loaded.items() if name != "quantized"}

    for strategy in (None, Drops()):
        model = Model()
        model.quantized = torch.nn.Parameter(tiny.Float8Tensor(torch.ones(4, 4)), requires_grad=False)
        tiny.CHECKPOINTS["disk"] = values(quantized=torch.full((4, 4), 0.3))
        load(model.sharded_state_dict(), **({} if strategy is None else {"sharded_strategy": strategy}))
        assert memory.source(model.first) is not None
        assert memory.known(model.quantized) is None


def test_an_optimizer_that_shards_otherwise_starts_from_the_parameters() -> None:
    model = Model()
    halves = tiny.distributed(model, size=2)
    model.load_state_dict(values())
    halves.reload_model_params()
    whole = tiny.distributed(model)
    assert same(whole, [model.first.detach().float(), model.second.detach().float()])


def fsdp(
    model: Model,
    group: list[torch.nn.Parameter],
    mains: list[torch.Tensor],
    ranges: Any,
    shard: bool,
    shared: bool = False,
) -> Any:
    """An optimizer under Megatron-FSDP, whose buffer has (this rank's part of) the masters of one group.

    ``shared``: so are the parameters.
    """

    def get_item(index: int, only_shard: bool) -> torch.Tensor:
        assert only_shard is shard
        return mains[index]

    buffer = SimpleNamespace(
        is_data_distributed=shard, locate_item_in_global_item=lambda index: ranges[index], get_item=get_item
    )
    weights = SimpleNamespace(is_data_distributed=shared)
    groups = [SimpleNamespace(params=group, main_weight_buffer=buffer, model_weight_buffer=weights)]
    model.param_and_grad_buffer = SimpleNamespace(parameter_groups=groups)
    optimizer = tiny.distributed(model)
    optimizer.ddp_config = SimpleNamespace(use_megatron_fsdp=True)
    return optimizer


def test_parameters_that_fsdp_shares_out_are_left_to_it() -> None:
    model = Model()
    optimizer = fsdp(model, [model.first], [torch.zeros(3)], [(0, 3)], shard=True, shared=True)
    model.load_state_dict(values())
    masters_module.write(optimizer, "reload_model_params", {}, reloaded=True)
    assert reasons() == {"Megatron-FSDP has shared out the parameter, too"}
    assert {record.held_by for record in mcore_patch.report()} == {"Megatron-FSDP"}
    assert memory.source(model.first) is None


@pytest.mark.parametrize("shard", [True, False])
def test_fsdps_masters_are_written_in_the_ranges_that_a_rank_has(shard: bool) -> None:
    model = Model()
    ranges = [(2, 5), (1, 4)] if shard else [(0, 6), (0, 5)]
    group, mains = [model.first, model.second], []
    optimizer = fsdp(model, group, mains, ranges, shard)
    model.load_state_dict(values())
    mains += [each.detach().float().reshape(-1)[a:b].clone() for each, (a, b) in zip(group, ranges, strict=True)]
    masters_module.write(optimizer, "reload_model_params", {}, reloaded=True)
    for (a, b), main, wanted in zip(ranges, mains, values().values(), strict=True):
        assert torch.equal(main, wanted.reshape(-1)[a:b])
    assert [record.numel for record in mcore_patch.report()] == [b - a for a, b in ranges]


def test_what_fsdp_has_loaded_by_itself_is_left_to_it() -> None:
    model = Model()
    mains = [torch.full((6,), 0.3), torch.full((5,), 0.3)]
    optimizer = fsdp(model, [model.first, model.second], mains, [(0, 6), (0, 5)], shard=True)
    model.load_state_dict(values())
    masters_module.write(optimizer, "reload_model_params", {}, reloaded=True)
    assert all((main == 0.3).all() for main in mains)
    assert [(each.name, each.held_by, each.reason, each.numel) for each in mcore_patch.report()] == [
        (name, "Megatron-FSDP", "Megatron-FSDP has loaded it by itself", 0) for name in ("first", "second")
    ]


def test_a_parameter_that_cannot_be_compared_is_left_to_fsdp() -> None:
    model = Model()
    model.first = torch.nn.Parameter(model.first.detach().as_subclass(Float4Tensor))
    model.load_state_dict({"second": values()["second"]}, strict=False)
    mains = [torch.full((6,), 0.3)]
    masters_module.write(fsdp(model, [model.first], mains, [(0, 6)], shard=True), "FSDP", {}, reloaded=True)
    assert (mains[0] == 0.3).all()
    told = [record.reason for record in mcore_patch.report() if record.event == "FSDP"]
    assert ["how it rounds is not known" in reason for reason in told] == [True]


def test_a_bare_torch_module_is_not_watched() -> None:
    linear = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    linear.load_state_dict({"weight": torch.randn(2, 2), "bias": torch.randn(2)})
    assert memory.empty
    sys.modules.pop("megatron.core.transformer.module")
    Model().load_state_dict(values())
    assert memory.empty


def test_an_fp16_model_whose_weights_come_before_its_cast() -> None:
    model = Model(torch.float32, fp16=True)
    model.load_state_dict(values())
    optimizer = tiny.plain(tiny.Float16Module(model, torch.float16))
    assert same(optimizer, list(values().values()))


def test_an_inner_optimizer_that_is_not_known_is_left_alone_and_told() -> None:
    model = Model()
    inner = SimpleNamespace(param_groups=[], name_to_dtype_map={})
    optimizer = tiny.distributed(model, inner)
    model.load_state_dict(values())
    optimizer.reload_model_params()
    assert reasons() == {"an inner optimizer that we do not know holds it"}
    assert {record.held_by for record in mcore_patch.report()} == {"SimpleNamespace"}


@pytest.mark.parametrize("kind", [tiny.DistributedOptimizer, tiny.Float16OptimizerWithFloat16Params])
def test_an_optimizer_without_groups_has_no_masters(kind: type) -> None:
    """A stub, where all parameters are frozen; one that was not built to its end."""
    stub = kind.__new__(kind)
    stub.optimizer = None
    masters_module.write(stub, "reload_model_params", {}, reloaded=True)
    masters_module.restored(stub, "load_state_dict")
    assert mcore_patch.report() == ()


def test_a_hybrid_optimizer_that_steps_16_bit_copies_has_no_masters() -> None:
    model = Model()
    inner = tiny.HybridDeviceOptimizer()
    optimizer = tiny.distributed(model, inner)
    inner.param_to_inner_param = {main: main.bfloat16() for main in inner.param_to_inner_param}
    model.load_state_dict(values())
    optimizer.reload_model_params()
    assert reasons() == {"it steps a 16-bit copy: there is no fp32 master"}
    assert {record.held_by for record in mcore_patch.report()} == {"HybridDeviceOptimizer"}


def test_what_a_hybrid_optimizer_steps_and_what_it_saves_follow_every_load() -> None:
    model, hybrid = Model(), tiny.HybridDeviceOptimizer()
    optimizer = tiny.distributed(model, hybrid)
    exact = {name: each.bfloat16() for name, each in values().items()}
    for restore_first in (False, True):
        for state in (values(), exact):
            if restore_first:
                restored = [torch.full_like(each, 7.7) for each in masters(optimizer)]
                optimizer.load_state_dict({"param_state": restored})
                assert same(optimizer, restored)
            model.load_state_dict(state)
            optimizer.reload_model_params()
            wanted = [each.float() for each in state.values()]
            assert same(optimizer, wanted)
            assert sum(record.changed for record in mcore_patch.report()) == 11
            saved = [each["master_param"] for each in hybrid.state.values()]
            assert all(torch.equal(one, other.reshape(-1)) for one, other in zip(saved, wanted, strict=False))
            assert len(saved) == (2 if restore_first else 0)
            built = optimizer.shard_fp32_from_float16_groups[0]
            assert all(torch.equal(one, other.reshape(-1)) for one, other in zip(built, wanted, strict=True))


def test_fused_adams_copy_of_an_fp32_parameter_follows_a_load() -> None:
    model = Model(torch.float32)
    adam = tiny.FusedAdam()
    optimizer = tiny.distributed(model, adam)
    for shard in optimizer.shard_fp32_groups[0]:
        adam.initialize_state(shard, False)
    model.load_state_dict(values())
    optimizer.reload_model_params()
    for shard, wanted in zip(optimizer.shard_fp32_groups[0], values().values(), strict=True):
        assert torch.equal(adam.get_unscaled_state(shard, "master_param"), wanted.reshape(-1))


def test_masters_in_fp16_that_have_not_been_made_are_the_parameters() -> None:
    model = Model()
    optimizer = tiny.distributed(model, tiny.FusedAdam("fp16"))
    model.load_state_dict({name: each.bfloat16() for name, each in values().items()})
    optimizer.reload_model_params()
    assert same(optimizer, [each.bfloat16().float() for each in values().values()])
    assert all("loses nothing" in reason for reason in reasons())


@pytest.mark.parametrize("exact", [False, True])
def test_verification_finds_a_master_that_was_not_written(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    model = Model()
    optimizer = tiny.distributed(model, tiny.HybridDeviceOptimizer())
    model.load_state_dict({name: each.bfloat16() if exact else each for name, each in values().items()})
    monkeypatch.setenv("MCORE_PATCH_VERIFY", "1")
    monkeypatch.setattr(masters_module, "_fill", lambda *_: torch.tensor(0))
    with pytest.raises(VerificationError, match=r"11 differ from their source \(first: 6 of 6; second: 5 of 5\)"):
        optimizer.reload_model_params()


def test_remainders_leave_the_whole_parameter_the_upper_half_of_its_master() -> None:
    """Of the other rank's shard, too, which this rank does not write."""
    for rank in (0, 1):
        model = Model()
        state = values(first=torch.full((3, 2), 1.00390625), second=torch.full((5,), -1.00390625))
        optimizer = tiny.distributed(model, tiny.FusedAdam("remainders"), rank=rank, size=2)
        model.load_state_dict(state)
        optimizer.reload_model_params()
        assert (model.first == 1.0078125).all()
        assert (model.second == -1.0078125).all()


def test_remainders_of_a_parameter_that_was_changed_since_are_not_kept() -> None:
    model = Model()
    optimizer = tiny.distributed(model, tiny.FusedAdam("remainders"))
    model.load_state_dict(values())
    optimizer.reload_model_params()
    with torch.no_grad():
        model.second[3] = 0.5
    optimizer.reload_model_params()
    assert same(optimizer, [values()["first"], model.second.detach().float()])


def test_a_master_that_nobody_refreshes_stays_while_it_holds() -> None:
    model = Model()
    optimizer = tiny.distributed(model, tiny.FusedAdam())
    model.load_state_dict(values())
    optimizer.reload_model_params()
    model.forward = lambda: None
    model()
    optimizer.reload_model_params()
    assert same(optimizer, list(values().values()))
    assert reasons() == {"no load of it was seen"}


def test_the_members_of_a_chain_are_its_ends() -> None:
    inner = [tiny.FP32Optimizer(None), tiny.FP32Optimizer(None), tiny.FP32Optimizer(None)]
    chain = tiny.ChainedOptimizer([inner[0], tiny.ChainedOptimizer(inner[1:])])
    assert optimizers.members(chain) == inner
    assert optimizers.members(inner[0]) == inner[:1]
    assert optimizers.strangers(chain) == []


def test_a_master_in_fp16_that_is_the_parameters_is_not_made_anew() -> None:
    model = Model()
    optimizer = tiny.distributed(model, tiny.FusedAdam("fp16"))
    model.load_state_dict(values())
    optimizer.reload_model_params()
    for told in ("; the master was from before the load", ""):
        model.load_state_dict({name: each.bfloat16() for name, each in values().items()})
        optimizer.reload_model_params()
        assert reasons() == {f"bfloat16 on disk loses nothing in bfloat16{told}"}


def test_a_master_in_fp16_is_kept_where_it_still_holds_and_made_anew_where_it_does_not() -> None:
    model, state = Model(), values()
    state["second"] = torch.tensor([1.0, 300.0, -0.011, 1e-30, 0.0])
    adam = tiny.FusedAdam("fp16")
    optimizer = tiny.distributed(model, adam)
    model.load_state_dict(state)
    optimizer.reload_model_params()
    held = [main.clone() for main in masters(optimizer)]
    optimizer.reload_model_params()
    assert reasons() == {"kept: it held the checkpoint's value"}
    assert same(optimizer, held)
    with torch.no_grad():
        model.second[0] = 1.0078125  # the next bf16
    optimizer.reload_model_params()
    told = "the parameter no longer is what the checkpoint said; the master was from before the load"
    assert reasons() == {"kept: it held the checkpoint's value", told}
    assert same(optimizer, [held[0], in_fp16(model.second.detach().float())])


def test_a_quantized_parameters_master_in_fp16_is_kept() -> None:
    model = Model()
    model.first = torch.nn.Parameter(tiny.Float8Tensor(torch.ones(3, 2)))
    optimizer = tiny.distributed(model, tiny.FusedAdam("fp16"))
    model.load_state_dict(values())
    for reason in ("load_state_dict", "kept: it held the checkpoint's value"):
        optimizer.reload_model_params()
        assert reasons() == {reason}


def test_a_fused_adam_is_asked_for_remainders_where_it_knows_them() -> None:
    class Old(tiny.FusedAdam):
        """As in Transformer Engine before 2.1."""

        def __init__(self) -> None:
            super().__init__()
            del self.store_param_remainders

        def initialize_state(self, shard: torch.Tensor) -> None:  # type: ignore[override]
            super().initialize_state(shard, False)

    class New(tiny.FusedAdam):
        """As since."""

        def initialize_state(self, shard: torch.Tensor, store_param_remainders: bool) -> None:
            assert store_param_remainders is False
            super().initialize_state(shard, store_param_remainders)

    for adam in (Old(), New()):
        model = Model()
        optimizer = tiny.distributed(model, adam)
        model.load_state_dict(values())
        optimizer.reload_model_params()
        assert same(optimizer, list(values().values()))


def test_how_far_a_master_in_fp16_may_be_from_what_was_written() -> None:
    adam, shard = tiny.FusedAdam("fp16"), torch.zeros(4, dtype=torch.bfloat16)
    master = optimizers._fused_adam_master(adam, torch.nn.Parameter(shard), 0, 4, shard)
    assert master.slack is not None
    assert master.slack().tolist() == [0, 0, 0, 0]
    # The scale is 1. Halfway between two values of fp16, among normal ones and below them, errors are the largest.
    written = torch.tensor([32752.0, 1 + 2.0**-11, 2.0**-25, 0.0])
    master.write(0, written.clone())
    errors = (master.read() - written).abs()
    assert errors.tolist() == [0, 2.0**-11, 2.0**-25, 0]
    assert (errors <= master.slack()).all()
    assert (master.slack() <= torch.tensor([16.1, 2.0**-11 * 1.01, 2.0**-25, 2.0**-25])).all()


def test_a_hybrid_optimizer_without_state_is_restored_as_it_is() -> None:
    optimizer = tiny.distributed(Model(), tiny.HybridDeviceOptimizer())
    masters_module.restored(optimizer, "optimizer.load_state_dict")
    assert reasons() == {"restored from optimizer state"}


def test_a_master_in_the_middle_of_a_parameter_is_kept() -> None:
    model = Model()
    optimizer = tiny.distributed(model, rank=1, size=4)
    model.load_state_dict(values())
    for reason in ("load_state_dict", "kept: it held the checkpoint's value"):
        optimizer.reload_model_params()
        assert reasons() == {reason}
    assert [main.numel() for main in masters(optimizer)] == [3]


def test_a_restored_master_has_its_name_in_the_chunk_and_not_that_of_the_load() -> None:
    model = Model()
    optimizer = tiny.distributed(model)
    wrapped = tiny.Float16Module(model, torch.bfloat16)
    wrapped.load_state_dict({f"module.{name}": each for name, each in values().items()})
    optimizer.load_state_dict({"param_state": masters(optimizer)})
    assert [record.name for record in mcore_patch.report()] == ["first", "second"]


def test_names_of_several_chunks_say_which() -> None:
    chunks = [Model(), Model()]
    names = optimizers.parameter_names(tiny.distributed(chunks))
    assert [names[id(each)] for chunk in chunks for each in chunk.parameters()] == [
        f"model{index}.{name}" for index in (0, 1) for name in ("first", "second")
    ]


def test_what_is_no_optimizer_of_megatron_cores_has_no_masters() -> None:
    masters_module.write(object(), "reload_model_params", {}, reloaded=True)
    masters_module.restored(object(), "load_state_dict")
    assert masters_module.keep_settled(object()) == {}
    assert mcore_patch.report() == ()


def record(reason: str, event: str) -> MasterRecord:
    return MasterRecord("name", (2,), 2, None, "bfloat16", "model", reason, 0, "Optimizer", event)


def test_a_line_has_its_events_and_the_three_most_frequent_reasons() -> None:
    reasons = ["a", "b", "c", "d", "d", "c", "b"]
    records = [record(reason, "built" if reason == "d" else "reload") for reason in reasons]
    assert summary(records) == (
        "mcore_patch: reload + built: masters on this rank: 7 from the model (14 elements); 0 elements differ from "
        "stock; 2 x b; 2 x c; 2 x d"
    )


@pytest.mark.parametrize(
    "available, initialized, rank, level",
    [(False, False, 3, "INFO"), (True, False, 3, "INFO"), (True, True, 0, "INFO"), (True, True, 1, "DEBUG")],
    ids=["torch without distributed", "no process group", "rank 0", "rank 1"],
)
def test_the_first_rank_speaks(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    available: bool,
    initialized: bool,
    rank: int,
    level: str,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: available)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    reporter = Reporter()
    with caplog.at_level("DEBUG", "mcore_patch"), reporter.event():
        reporter.add(torch.nn.Parameter(torch.zeros(2)), record("why", "reload"))
    assert [each.levelname for each in caplog.records] == [level]


def test_a_reporter_begins_with_nothing() -> None:
    reporter = Reporter()
    assert reporter.records() == ()
    with reporter.event():
        pass
    assert reporter.records() == ()


def test_optimizer_state_that_comes_first_leaves_nothing_remembered() -> None:
    for build, key in ((tiny.distributed, "param_state"), (tiny.plain, "masters")):
        model = Model()
        optimizer = build(model)
        model.load_state_dict(values())
        saved = [torch.full_like(main, 7.7) for main in masters(optimizer)]
        optimizer.load_state_dict({key: saved})
        assert memory.empty
        assert same(optimizer, saved)
        assert [record.name for record in mcore_patch.report()][-2:] == ["first", "second"]


def test_a_master_whose_name_nobody_knows_is_a_question_mark() -> None:
    model = Model()
    optimizer = tiny.plain(model)
    optimizer.load_state_dict({"masters": masters(optimizer)})
    assert {record.name for record in mcore_patch.report()} == {"?"}
    with pytest.raises(
        StateDictMismatchError, match=r"\?: \(3, 2\) expected, no load of it was seen, so its name is not"
    ):
        optimizer.reload_model_params(values())


def test_a_plain_optimizer_finds_a_chunks_parameter_by_what_its_load_called_it() -> None:
    model = Model()
    optimizer = tiny.plain(model)
    good = {f"decoder.{name}": each for name, each in values().items()}
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(values()[name])
        memory.loaded(parameter, values()[name], "test", name=f"model1.module.decoder.{name}")
    with pytest.raises(StateDictMismatchError, match=r"decoder.first: \(3, 2\) expected, \(7,\) found"):
        optimizer.reload_model_params({"model0": good | {"decoder.first": torch.zeros(7)}})
    other = {name: torch.zeros_like(each) for name, each in good.items()}
    optimizer.reload_model_params({"model0": other, "model1": good})
    assert same(optimizer, list(values().values()))
    # Where no chunk's tensor is what the parameter holds, any will do: its value stands.
    optimizer.reload_model_params({"model0": other, "model1": other})
    assert same(optimizer, [each.detach().float() for each in model.parameters()])


def test_a_state_dict_reaches_those_of_a_chain_that_are_not_known_and_no_others() -> None:
    from mcore_patch._stations import reload

    class Records:
        """Of a user's own class."""

        param_groups: Any = ()

        def __init__(self) -> None:
            self.calls: list[Any] = []

        def reload_model_params(self, **given: Any) -> None:
            self.calls.append(given)

    class Known(tiny.FP32Optimizer, Records):
        """Of a user's own class, over one of megatron-core's."""

        def __init__(self) -> None:
            Records.__init__(self)

        reload_model_params = Records.reload_model_params  # type: ignore[assignment]

    seen: list[Any] = []
    known, unknown = Known(), Records()
    reload.each(lambda *args: seen.append(args), tiny.ChainedOptimizer([known, unknown]), {"a": 1})
    assert (known.calls, unknown.calls, seen) == ([{}], [{"state_dict": {"a": 1}}], [])
    chain = tiny.ChainedOptimizer([known])
    reload.each(lambda *args: seen.append(args), chain, {"a": 1})
    assert (known.calls, seen) == ([{}], [(chain,)])


def test_what_an_optimizer_that_is_not_known_holds_has_its_name_in_the_chunk() -> None:
    class Strange:
        """Of a user's own class."""

        def reload_model_params(self) -> None: ...

    class Stranger(Strange):
        """With parameters."""

        def __init__(self, *parameters: torch.nn.Parameter) -> None:
            self.param_groups = [{"params": list(parameters)}]

    model, other = Model(), Model()
    chain = tiny.ChainedOptimizer([tiny.distributed(model), Strange(), Stranger(model.second, other.first)])
    wrapped = tiny.Float16Module(other, torch.bfloat16)
    wrapped.load_state_dict({f"module.{name}": each for name, each in values().items()})
    chain.reload_model_params()
    told = {record.name: record.held_by for record in mcore_patch.report()}
    assert told == {"first": "DistributedOptimizer", "second": "Stranger", "module.first": "Stranger"}


@pytest.mark.parametrize("lists", ["dp_cp_params_list", "expt_dp_params_list"])
def test_what_a_layer_wise_optimizer_has_shared_out_is_let_go_where_others_hold_it(lists: str) -> None:
    model = Model()
    inner = SimpleNamespace(param_groups=[{"params": [model.first, model.second]}])
    optimizer = tiny.LayerWiseDistributedOptimizer([inner], SimpleNamespace())
    shared = optimizer.dp_cp_params_list
    vars(optimizer).update({"dp_cp_params_list": None, "expt_dp_params_list": None, lists: shared})
    model.load_state_dict(values())
    for reason in ("load_state_dict", "kept: it held the checkpoint's value"):
        optimizer.reload_model_params()
        assert memory.known(model.second) is None, "another rank's"
        assert [record.reason for record in mcore_patch.report()] == [reason]


def test_a_model_that_loads_its_own_parameters_still_has_what_it_loaded_before() -> None:
    model = Model()
    optimizer = tiny.distributed(model)
    model.load_state_dict(values())
    model.load_state_dict(model.state_dict())
    optimizer.reload_model_params()
    assert same(optimizer, list(values().values()))


@pytest.mark.parametrize(
    "config, narrow",
    [
        ({}, None),
        ({"bf16": True}, torch.bfloat16),
        ({"fp16": True}, torch.float16),
        ({"bf16": False, "fp16": False}, None),
        (None, None),
    ],
    ids=["neither", "bf16", "fp16", "switched off", "no config"],
)
def test_the_dtype_to_which_a_model_will_be_cast_stands_in_its_config(config: Any, narrow: Any) -> None:
    module: Any = torch.nn.Module()
    if config is not None:
        module.config = SimpleNamespace(**config)
    assert modules._narrow_dtype(module) is narrow


@pytest.mark.parametrize(
    "config, under",
    [
        ({}, False),
        ({"use_megatron_fsdp": True}, True),
        ({"use_custom_fsdp": True}, True),
        ({"use_megatron_fsdp": False, "use_custom_fsdp": False}, False),
        (None, False),
    ],
    ids=["neither", "Megatron-FSDP", "custom FSDP", "switched off", "no config"],
)
def test_an_optimizer_under_fsdp_is_known_by_its_config(config: Any, under: bool) -> None:
    kept = {} if config is None else {"ddp_config": SimpleNamespace(**config)}
    assert optimizers._is_under_fsdp(SimpleNamespace(**kept)) is under


def test_under_fsdp_the_parameters_of_its_groups_are_those_that_are_stepped() -> None:
    model = Model()
    optimizer = fsdp(model, [model.second], [torch.zeros(5)], [(0, 5)], shard=True)
    assert [each is model.second for each in optimizers._distributed_owned(optimizer)] == [True]


def test_a_state_dict_reaches_a_single_optimizer_that_is_not_known() -> None:
    from mcore_patch._stations import reload

    class Users:
        """Of a user's own class."""

        param_groups: Any = ()

    seen: list[Any] = []
    optimizer, state = Users(), {"a": 1}
    reload.each(lambda *args: seen.append(args), optimizer, state)
    assert seen == [(optimizer, state)]
    reload.each(lambda *args: seen.append(args), optimizer, None)
    assert seen[1:] == [(optimizer,)]


def test_a_parameter_changed_after_its_master_was_written_takes_it_along() -> None:
    model = Model()
    optimizer = tiny.distributed(model)
    model.load_state_dict(values())
    optimizer.reload_model_params()
    with torch.no_grad():
        model.second.neg_()
    optimizer.reload_model_params()
    assert same(optimizer, [values()["first"], model.second.float()])
    assert reasons() >= {"the parameter no longer is what the checkpoint said"}


def test_a_loaded_tensor_that_is_changed_before_its_use_is_not_believed() -> None:
    for inner in (None, tiny.FusedAdam("remainders")):
        model, state = Model(), values()
        optimizer = tiny.distributed(model, inner)
        model.load_state_dict(state)
        state["second"].add_(1)
        optimizer.reload_model_params()
        assert torch.equal(masters(optimizer)[1], model.second.float())
        assert "the loaded tensor was changed in place after the load" in reasons()


def test_a_parameter_changed_between_two_writes_of_remainders_is_not_believed() -> None:
    model = Model()
    optimizer = tiny.distributed(model, tiny.FusedAdam("remainders"))
    model.load_state_dict(values())
    with torch.no_grad():
        model.second.add_(1)
    optimizer.reload_model_params()
    assert torch.equal(masters(optimizer)[1], model.second.float())


@pytest.mark.parametrize("disk", [torch.float32, torch.float64])
def test_remainders_are_written_again_where_the_first_write_has_moved_a_parameter_off_a_tie(disk: torch.dtype) -> None:
    model = Model()
    state = {name: each.to(disk) for name, each in values(first=torch.full((3, 2), 1.00390625)).items()}
    optimizer = tiny.distributed(model, tiny.FusedAdam("remainders"))
    model.load_state_dict(state)
    for _ in range(3):
        optimizer.reload_model_params(state)
        assert same(optimizer, [each.float() for each in state.values()])
        assert (model.first == 1.0078125).all(), "the upper half of the master, and not the even neighbour, 1"
        assert {record.source for record in mcore_patch.report()} == {"checkpoint"}
    with torch.no_grad():
        model.first[2, 1] = 1.0
    optimizer.reload_model_params(state)
    assert torch.equal(masters(optimizer)[0], model.first.float().reshape(-1))
    assert "the parameter no longer is what the checkpoint said; the master was from before the load" in reasons()


@pytest.mark.parametrize("disk", [torch.float32, torch.float64])
def test_a_write_that_fails_half_way_gives_the_parameters_value(
    monkeypatch: pytest.MonkeyPatch, disk: torch.dtype
) -> None:
    monkeypatch.setattr(parameters, "CHUNK", 2)
    held = torch.full((7,), 5.0)
    wrote: list[int] = []

    def write(begin: int, new: torch.Tensor) -> None:
        assert new.dtype is torch.float32
        wrote.append(begin)
        if len(wrote) == 3:
            raise MemoryError
        held[begin : begin + new.numel()] = new

    parameter = torch.nn.Parameter(torch.arange(10, dtype=torch.bfloat16))
    master = optimizers.Master(parameter, 2, 9, "Optimizer", lambda: held, write)
    with pytest.raises(MemoryError):
        masters_module._fill(master, torch.full((7,), 1.3, dtype=disk))
    assert wrote == [0, 2, 4, 0]
    assert held.tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_what_a_write_changed_is_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "CHUNK", 2)
    monkeypatch.setattr(masters_module, "differing", lambda new, before: torch.tensor(2**24 + 1))
    held = torch.zeros(3)
    master = optimizers.Master(torch.nn.Parameter(torch.zeros(3)), 0, 3, "Optimizer", lambda: held, lambda *_: None)
    assert masters_module._fill(master, torch.zeros(3)).item() == 2 * (2**24 + 1)


def test_a_master_that_its_optimizer_no_longer_has_is_not_kept() -> None:
    model = Model()
    first = tiny.distributed(model)
    model.load_state_dict(values())
    first.reload_model_params()
    for groups in (first.model_float16_groups, first.shard_float16_groups, first.shard_fp32_from_float16_groups):
        groups[0].pop()
    second = tiny.distributed(model)
    assert same(second, [values()["first"], model.second.detach().float()])


def test_a_checksum_tells_places_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "CHUNK", 3)
    shard = torch.tensor([1.0, -2.0, 3.0, 0.5, 1.0, 7.0, -1.0, 2.0], dtype=torch.bfloat16)
    words = shard.view(torch.int16).tolist()
    checksum = masters_module._checksum(shard)
    assert checksum.item() == sum((2 * index + 1) * word for index, word in enumerate(words))
    assert checksum.dtype is torch.int64


def test_a_name_that_the_state_dict_lacks_is_told_by_its_last_load() -> None:
    model = Model()
    optimizer = tiny.plain(model)
    model.load_state_dict(values())
    state = {"model": values(first=torch.zeros(7))}
    del state["model"]["second"]
    with pytest.raises(StateDictMismatchError, match=r"first.*\(7,\) found.*second.*not in the state dict"):
        optimizer.reload_model_params(state)


def test_a_module_that_runs_twice_is_walked_once() -> None:
    model, other = Model(), Model()
    model.load_state_dict(values())
    other.load_state_dict(values())
    model.forward = lambda: None
    model()
    model()
    assert memory.source(other.first) is not None
    assert memory.source(model.first) is None


def test_a_plan_of_this_rank_alone_needs_nothing_of_the_others() -> None:
    shards = disk._Shards.__new__(disk._Shards)
    assert shards.create_global_plan([]) == []
    plan = SimpleNamespace()
    assert shards.finish_plan(plan) is plan  # type: ignore[arg-type, comparison-overlap]


def test_a_wrapper_that_passes_load_state_dict_on_is_one_load() -> None:
    class Wrapper(torch.nn.Module):
        """As DistributedDataParallel of megatron-core."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            return self.module.load_state_dict(state_dict, strict)

    class Outer(Wrapper):
        """Calls the load of its content from within its own."""

        def _load_from_state_dict(self, state_dict: Any, *args: Any) -> None:
            self.module.load_state_dict(values())

    model = Model()
    optimizer = tiny.distributed(model)
    torch.nn.Module.load_state_dict(Outer(model), {}, strict=False)
    optimizer.reload_model_params()
    assert same(optimizer, list(values().values()))


def test_under_torchs_swapping_flag_a_second_load_finds_nobody_holding_a_parameter() -> None:
    model = Model()
    optimizer = tiny.distributed(model)
    with tiny.swapping():
        for _ in range(2):
            model.load_state_dict(values())
    optimizer.reload_model_params()
    assert same(optimizer, list(values().values()))


@pytest.mark.skipif(not hasattr(torch.utils, "swap_tensors"), reason="swapping has come in torch 2.3")
def test_where_a_parameter_cannot_be_let_go_for_a_swap_everything_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    before, model = Model(), Model()
    before.load_state_dict(values())
    with tiny.swapping(), monkeypatch.context() as failing:
        failing.setattr(memory, "forget", lambda _: 1 / 0)
        model.load_state_dict(values())
    assert memory.known(before.first) is None
    assert guard._said == {"letting go of parameters that may be swapped"}
    guard._said.clear()


def test_verification_names_the_rank_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_patch._stations import verify

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 4)
    assert verify._rank() == "4"
