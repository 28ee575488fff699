"""Every kind of pipeline: where each master comes from, bit for bit, what the report says of it, and the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import tiny
import torch
from pipelines import PIPELINES, Bits, bits, checkpoint, in_fp16, run

import mcore_patch
from mcore_patch._stations import guard, parameters

pytestmark = pytest.mark.edges

WHOLE = {"embedding.weight": 15, "linear.weight": 12, "linear.bias": 4, "output.bias": 5}
RANK_0 = {"embedding.weight": 15, "linear.weight": 6}
RANK_1 = {"linear.weight": 6, "linear.bias": 4, "output.bias": 5}
# Without a model chunk a parameter has the name of its last load; here with the one that its last tie has.
PLAIN = {"empty": 0, "module.output.weight": 15, "module.linear.weight": 12, "module.linear.bias": 4}
PLAIN |= {"module.output.bias": 5}
CAST = PLAIN | {"norm.weight": 3, "norm.bias": 3}
STRANGERS = 8
SHAPES = {"embedding.weight": (5, 3), "linear.weight": (4, 3), "linear.bias": (4,), "output.bias": (5,)}
SHAPES |= {"output.weight": (5, 3), "empty": (0,), "norm.weight": (3,), "norm.bias": (3,), "?": (4, 3)}

DISTRIBUTED, FLOAT16 = "DistributedOptimizer", "Float16OptimizerWithFloat16Params"
GIVEN = "reload_model_params(state_dict=...)"
KEPT = "kept: it held the checkpoint's value"
STATE = "restored from optimizer state"
EXACT = "bfloat16 on disk loses nothing in bfloat16"
OLD = "; the master was from before the load"
UNSEEN = "no load of it was seen"
CHANGED = "the parameter no longer is what the checkpoint said"
UNKNOWN = "pipelines.Float4Tensor: how it rounds is not known here, so it is left to megatron-core"


@dataclass(frozen=True)
class Expected:
    """The elements of each master on the rank, by name, and why it has its value; ``but`` is for some of them."""

    masters: dict[str, int]
    reason: str = "load_state_dict"
    held_by: str = DISTRIBUTED
    event: str = "reload_model_params"
    but: dict[str, str] = field(default_factory=dict)

    def why(self, name: str) -> str:
        return self.but.get(name, self.reason)


FROM_CHECKPOINT = {"load_state_dict", "dist_checkpointing.load", GIVEN, KEPT}
# What the last load of a master's parameter was: of fp32, unless nothing is known of it any more.
DISK = {STATE: None, UNSEEN: None, UNKNOWN: None, EXACT: "bfloat16", EXACT + OLD: "bfloat16"}

BUILT = "optimizer built"
EXPECTED = {
    "torch_rank_0": Expected(RANK_0),
    "torch_rank_1": Expected(RANK_1),
    "torch_plain": Expected(PLAIN, held_by=FLOAT16),
    "torch_weights_first": Expected(WHOLE, event=BUILT),
    "weights_before_the_cast": Expected(CAST, held_by=FLOAT16, event=BUILT),
    "weights_before_a_swapping_cast": Expected(CAST, held_by=FLOAT16, event=BUILT),
    "dist": Expected(RANK_0),
    "dist_with_mismatches_returned": Expected(RANK_0),
    "dist_in_place": Expected(RANK_0, "dist_checkpointing.load"),
    "dist_fully_parallel": Expected(RANK_0),
    "given": Expected(WHOLE, GIVEN),
    "given_to_the_plain_one": Expected(
        {name.removeprefix("module."): numel for name, numel in PLAIN.items()}, GIVEN, FLOAT16
    ),
    "given_to_a_chain_with_a_stranger": Expected(WHOLE, GIVEN),
    "given_under_other_names": Expected(WHOLE, GIVEN),
    "dist_short_of_memory": Expected(RANK_0, EXACT),
    "dist_quantized": Expected(RANK_0),
    "dist_quantized_and_metadata_unreadable": Expected(RANK_0),
    "reload_twice": Expected(RANK_0, KEPT),
    "two_loads": Expected(WHOLE, EXACT),
    "two_optimizers": Expected(WHOLE, KEPT, event=BUILT),
    "changed_after_the_load": Expected(WHOLE, but={"linear.weight": CHANGED}),
    "forward_then_reload": Expected(RANK_0, UNSEEN),
    "optimizer_state_without_masters": Expected(WHOLE, event="optimizer.load_state_dict"),
    "optimizer_state": Expected(RANK_0, STATE, event="optimizer.load_state_dict"),
    "optimizer_state_from_dp_zero": Expected(RANK_0, STATE, event="load_parameter_state"),
    "optimizer_state_of_the_plain_one": Expected(PLAIN, STATE, FLOAT16, "optimizer.load_state_dict"),
    "optimizer_state_of_a_hybrid_one": Expected(WHOLE, STATE, "HybridDeviceOptimizer", "optimizer.load_state_dict"),
    "layer_wise": Expected(
        {name: PLAIN[name] for name in ("empty", "module.linear.weight", "module.output.bias")},
        STATE,
        FLOAT16,
        "optimizer.load_state_dict",
    ),
    "chain_with_a_stranger": Expected(WHOLE),
    "precision_aware": Expected(WHOLE, held_by="FusedAdam"),
    "precision_aware_fp16": Expected(WHOLE, held_by="FusedAdam"),
    "remainders": Expected(WHOLE, held_by="FusedAdam"),
    "remainders_reloaded": Expected(WHOLE, KEPT, held_by="FusedAdam"),
    "fp16_masters_reloaded": Expected(WHOLE, EXACT + OLD, held_by="FusedAdam"),
    "hybrid": Expected(WHOLE, held_by="HybridDeviceOptimizer"),
    "quantized": Expected(PLAIN, held_by=FLOAT16),
    "quantized_weights_first": Expected(RANK_0, event=BUILT),
    "quantized_without_a_load": Expected(WHOLE, UNSEEN),
    "quantized_in_an_unknown_way": Expected(
        {"?" if name == "module.linear.weight" else name: numel for name, numel in PLAIN.items()},
        held_by=FLOAT16,
        but={"?": UNKNOWN},
    ),
    # The second parameter of the group is on other ranks, and the group behind it is shared out.
    "under_fsdp": Expected({**WHOLE, "embedding.weight": 0}, held_by="Megatron-FSDP"),
    "zarr": Expected(RANK_0),
    "zarr_not_on_device": Expected(RANK_0),
}


@pytest.fixture(autouse=True)
def _in_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parameters, "CHUNK", 5)  # several to a master
    with tiny.installed():
        yield


def run_anew(name: str) -> tuple[Bits, Bits, Bits]:
    tiny.forget()
    return run(name)


def test_every_pipeline_has_its_expectation() -> None:
    assert EXPECTED.keys() == PIPELINES.keys()


IN_FP16 = {"precision_aware_fp16", "fp16_masters_reloaded"}
SAVED = {"layer_wise"}  # its optimizer state has what the masters had before
RESTORED_BESIDE = {"optimizer_state_of_a_hybrid_one"}  # in stock: into something else than what is stepped


def wanted_masters(name: str, stock: Bits) -> Bits:
    """The masters' bits: the checkpoint's values, or stock's."""
    expected = EXPECTED[name]
    tiny.forget()
    model, optimizer = PIPELINES[name]()
    disk, names = {}, {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        disk[id(tensor)] = checkpoint(model)[key]
        names[id(tensor)] = [*names.get(id(tensor), []), key, key.removeprefix("module.")]
    wanted = []
    for (parameter, start, stop, _), stocks in zip(tiny.masters_of(optimizer), stock, strict=True):
        known = next((each for each in names[id(parameter)] if each in expected.masters), "?")
        seen = expected.masters.get(known) == stop - start  # FSDP's that other ranks have are not
        from_disk = seen and (expected.why(known) in FROM_CHECKPOINT or name in SAVED)
        value = disk[id(parameter)].reshape(-1)[start:stop]
        if name in RESTORED_BESIDE:
            wanted.append(bits(torch.full_like(value, 7.7)))
        elif name in IN_FP16:
            wanted.append(bits(in_fp16(value if from_disk else parameter.detach().float().reshape(-1)[start:stop])))
        else:
            wanted.append(bits(value) if from_disk else stocks)
    return wanted


@pytest.mark.parametrize("name", PIPELINES)
def test_each_master_is_the_checkpoints_value_or_stocks_and_the_model_is_stocks(name: str) -> None:
    stock_model, stock, _ = run_anew(name)
    with tiny.patched():
        model, masters, _ = run_anew(name)
        records = mcore_patch.report()
        assert not guard._said, "a step failed"
    if "remainders" in name:  # on a tie the parameter is another, see README
        assert 0 < sum(a != b for a, b in zip(stock_model, model, strict=True)) <= 5
    else:
        assert model == stock_model
    assert masters == wanted_masters(name, stock)
    if any(each.source == "checkpoint" for each in records):
        assert masters != stock, "nothing is lost in stock: the test proves nothing"


@pytest.mark.parametrize("name", PIPELINES)
def test_the_report_says_of_each_master_where_it_came_from(name: str) -> None:
    _, stock, _ = run_anew(name)
    with tiny.patched():
        _, masters, _ = run_anew(name)
        records = [each for each in mcore_patch.report() if each.held_by != "Strange"]
        strangers = [each for each in mcore_patch.report() if each.held_by == "Strange"]
    expected = EXPECTED[name]
    assert {each.name: each.numel for each in records} == {k: v for k, v in expected.masters.items() if v or k in PLAIN}
    for record in records:
        why = expected.why(record.name)
        source = "checkpoint" if why in FROM_CHECKPOINT else "optimizer state" if why == STATE else "model"
        assert (record.reason, record.source) == (why, source)
        assert (record.disk_dtype, record.parameter_dtype) == (DISK.get(why, "float32"), "bfloat16")
        assert (record.event, record.held_by) == (expected.event, expected.held_by)
        assert record.shape == SHAPES[record.name.removeprefix("module.")]
    changed = sum(each.changed for each in records)
    if name not in IN_FP16 and name != "under_fsdp" and expected.reason not in (STATE, KEPT):
        assert changed == sum(differing(a, b) for a, b in zip(masters, stock, strict=True))
    assert len(strangers) == (STRANGERS if "stranger" in name else 0)
    for record in strangers:
        assert (record.name, record.source, record.numel, record.changed) == ("?", "model", 0, 0)
        assert record.reason == "an optimizer that we do not know holds it"


@pytest.mark.parametrize("name", PIPELINES)
def test_every_master_that_was_written_is_verified(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MCORE_PATCH_VERIFY", "1")
    with caplog.at_level(logging.INFO, "mcore_patch"), tiny.patched():
        caplog.clear()
        run_anew(name)
        said = [each.getMessage() for each in caplog.records if "verified" in each.getMessage()]
        written = [each for each in mcore_patch.report() if each.source == "checkpoint" or OLD in each.reason]
    assert said
    assert all("0 differ from their source" in line for line in said)
    if written:
        counts = (
            f": {EXPECTED[name].event}: verified {len(written)} masters, {sum(each.numel for each in written)} elements"
        )
        assert any(counts in line for line in said)


def differing(left: bytes, right: bytes) -> int:
    """Of two masters, in elements."""
    a, b = (torch.frombuffer(bytearray(each), dtype=torch.int32) if each else torch.empty(0) for each in (left, right))
    return int((a != b).sum())


LINES = {
    "torch_rank_0": [
        "mcore_patch: reload_model_params: masters on this rank: 2 from the checkpoint (21 elements); "
        "21 elements differ from stock"
    ],
    "changed_after_the_load": [
        "mcore_patch: reload_model_params: masters on this rank: 3 from the checkpoint (24 elements), 1 from the model "
        f"(12 elements); 24 elements differ from stock; 1 x {CHANGED}"
    ],
    "optimizer_state": [
        "mcore_patch: reload_model_params: masters on this rank: 2 from the checkpoint (21 elements); "
        "21 elements differ from stock",
        "mcore_patch: optimizer.load_state_dict: masters on this rank: 2 from the optimizer state (21 elements); "
        "0 elements differ from stock",
    ],
    "chain_with_a_stranger": [
        "mcore_patch: reload_model_params: masters on this rank: 4 from the checkpoint (36 elements), 8 from the model "
        "(0 elements); 36 elements differ from stock; 8 x an optimizer that we do not know holds it"
    ],
}


@pytest.mark.parametrize("name", LINES)
def test_one_line_per_event_says_where_masters_came_from(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mcore_patch"), tiny.patched():
        caplog.clear()
        run_anew(name)
        said = [(each.levelname, each.getMessage()) for each in caplog.records]
    about_masters = [(level, line) for level, line in said if "masters on this rank" in line]
    assert [each for each in about_masters if "optimizer built" not in each[1]] == [("INFO", x) for x in LINES[name]]
