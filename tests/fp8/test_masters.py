"""fp8 parameters, on the installed pair of megatron-core and Transformer Engine: stock loses, patched does not."""

from __future__ import annotations

import importlib
from collections import Counter
from pkgutil import iter_modules

import pytest
import torch

from .conftest import Runs, pair

JUDGED = {"Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor"}
LEFT = {"NVFP4Tensor", "GroupedTensor", "HybridQuantizedTensor", "IdentityTensor"}
DISKS = ["bfloat16", "float32"]
LOSING = ["reload", "weights_first", "distributed", "edited"]


def mcore() -> tuple[int, ...]:
    return tuple(int(part) for part in pair().mcore.split("."))


@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("case", LOSING)
def test_masters_are_the_checkpoints_and_parameters_are_stocks(run: Runs, recipe: str, case: str, disk: str) -> None:
    stock, patched = (run(case, patched, recipe=recipe, disk=disk)[0] for patched in (False, True))
    assert stock.differing > stock.total // 2, "stock does not show the defect: the case proves nothing"
    assert patched.differing == 0
    assert patched.model == stock.model
    assert patched.work == stock.work, "nothing is quantized once more, and no collective is added"


@pytest.mark.parametrize("case", ["reload_with_state_dict", "distributed_with_state_dict", "reload_twice"])
def test_masters_are_the_checkpoints_with_a_state_dict_and_again(run: Runs, recipe: str, case: str) -> None:
    patched = run(case, True, recipe=recipe, disk="float32")[0]
    assert patched.differing == 0


@pytest.mark.parametrize("disk", DISKS)
def test_an_in_place_load_gives_masters_wherever_it_gives_parameters(run: Runs, recipe: str, disk: str) -> None:
    stock, patched = (run("in_place", patched, recipe=recipe, disk=disk)[0] for patched in (False, True))
    assert patched.model == stock.model
    assert patched.extra == stock.extra
    if stock.extra:
        assert patched.differing == 0
    else:
        # 0.14 to 0.18 load into scratch tensors: the fp8 parameters stay at their initial values, and so do masters.
        assert (0, 14) <= mcore() < (0, 19)
        assert patched.differing <= stock.differing


def test_a_second_optimizer_can_be_built_over_the_same_model(run: Runs, recipe: str) -> None:
    stock, patched = (run("two_optimizers", patched, recipe=recipe, disk="float32")[0] for patched in (False, True))
    # Transformer Engine keeps initial values since 2.2, and megatron-core asks it to since 0.12.
    keeps = mcore() >= (0, 12) and not pair().te.startswith(("1.", "2.1."))
    assert (stock.extra == "'NoneType' object has no attribute 'view'") == keeps
    assert patched.extra is None
    assert patched.differing == 0


@pytest.mark.parametrize("case", ["distributed", pytest.param("weights_first", marks=pytest.mark.wide)])
def test_two_ranks(run: Runs, recipe: str, case: str) -> None:
    stock, patched = (run(case, patched, 2, recipe=recipe, disk="float32") for patched in (False, True))
    assert stock[0].differing > stock[0].total // 2
    assert patched[0].differing == 0
    for theirs, ours in zip(stock, patched, strict=True):
        assert ours.model == theirs.model
        assert ours.work == theirs.work


@pytest.mark.parametrize("disk", DISKS)
def test_only_quantization_explains_a_difference(run: Runs, recipe: str, disk: str) -> None:
    answers, count = run("judged", True, recipe=recipe, disk=disk)[0].extra
    assert answers.pop("the checkpoint") == count
    assert answers == dict.fromkeys(answers, 0)


@pytest.mark.wide
@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize(
    "case",
    [
        "fully_parallel",
        pytest.param(
            "dequantized_before", marks=pytest.mark.skipif(mcore() < (0, 19), reason="an option of 0.19 and later")
        ),
    ],
)
def test_other_ways_to_load_a_distributed_checkpoint(run: Runs, case: str, disk: str) -> None:
    recipe = "tensorwise" if "tensorwise" in pair().recipes else "delayed"
    stock, patched = (run(case, patched, 2, recipe=recipe, disk=disk) for patched in (False, True))
    assert stock[0].differing > stock[0].total // 2
    assert patched[0].differing == 0
    # Which rank reads what follows from the sizes of the tensors, and some are loaded in a wider dtype. With delayed
    # scaling the amax history of the rank that has read differs from the others', in stock too: compared as a set.
    for name in stock[0].model:
        assert sorted(rank.model[name] for rank in patched) == sorted(rank.model[name] for rank in stock)
    work = [sum((rank.work for rank in ranks), Counter()) for ranks in (stock, patched)]
    assert work[0] == work[1]


def test_every_quantized_class_of_the_release_is_recognised() -> None:
    from mcore_patch._stations.quantized import is_known, is_quantized

    classes = quantized_classes()
    assert "Float8Tensor" in classes
    assert set(classes) <= JUDGED | LEFT, "a class that nobody has looked at"
    for name, cls in classes.items():
        instance = torch.Tensor._make_subclass(cls, torch.zeros(2))
        assert is_quantized(instance)
        assert is_known(instance) == (name in JUDGED)


def quantized_classes() -> dict[str, type[torch.Tensor]]:
    """The tensor classes that Transformer Engine defines among its tensors, but for their common base."""
    import transformer_engine.pytorch.tensor as tensors

    modules = [importlib.import_module(f"{tensors.__name__}.{each.name}") for each in iter_modules(tensors.__path__)]
    return {
        name: cls
        for module in modules
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, torch.Tensor) and cls.__module__ == module.__name__
        if name != "QuantizedTensor"
    }


@pytest.mark.skipif(not pair().steps, reason="upstream's own step does not work with this pair, see compat/")
def test_training_goes_as_from_masters_that_were_set_by_hand(run: Runs, recipe: str) -> None:
    stock, patched, by_hand = (
        run(case, patched, recipe=recipe, disk="bfloat16", steps=3)[0].losses
        for case, patched in (("reload", False), ("reload", True), ("masters_by_hand", False))
    )
    assert patched == by_hand
    assert stock != by_hand


@pytest.mark.skipif(mcore() < (0, 12), reason="fp8 experts need a grouped MLP of 0.12 or later")
@pytest.mark.parametrize(
    "experts, case, disk",
    [
        (4, "reload", "float32"),
        # Twelve on each rank: weight1 is a prefix of weight10.
        pytest.param(24, "reload_with_state_dict", "float32", marks=pytest.mark.wide),
        pytest.param(24, "distributed", "float32", marks=pytest.mark.wide),
        pytest.param(24, "distributed", "bfloat16", marks=pytest.mark.wide),
        pytest.param(24, "distributed_with_state_dict", "float32", marks=pytest.mark.wide),
        pytest.param(4, "weights_first", "bfloat16", marks=pytest.mark.wide),
    ],
)
def test_grouped_experts_on_two_expert_parallel_ranks(run: Runs, experts: int, case: str, disk: str) -> None:
    options = {"recipe": "tensorwise" if "tensorwise" in pair().recipes else "delayed"}
    options |= {"experts": experts, "expert_parallel": 2, "disk": disk}
    patched = run(case, True, 2, **options)
    assert patched[0].differing == 0
    if not case.endswith("with_state_dict"):
        stock = run(case, False, 2, **options)
        assert stock[0].differing > stock[0].total // 2
        for theirs, ours in zip(stock, patched, strict=True):
            assert ours.model == theirs.model
            assert ours.work == theirs.work


PRECISION_AWARE = [
    pytest.param({}, id="fp32 masters"),
    pytest.param({"store_param_remainders": True}, id="remainders"),
]


@pytest.mark.skipif(mcore() < (0, 11), reason="the precision-aware optimizer has come in 0.11")
@pytest.mark.skipif(pair().te.startswith("1."), reason="0.11 and 0.12 ask for a newer FusedAdam")
@pytest.mark.parametrize("options", PRECISION_AWARE)
@pytest.mark.parametrize("case", ["reload", "weights_first"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_masters_that_fused_adam_holds(run: Runs, case: str, options: dict[str, bool], ranks: int) -> None:
    chosen = {"recipe": None, "precision_aware": True, "disk": "float32", **options}
    stock, patched = (run(case, patched, ranks, **chosen) for patched in (False, True))
    assert stock[0].differing > stock[0].total // 2
    assert patched[0].differing == 0
    assert all(rank.model == patched[0].model for rank in patched), "ranks must hold the same parameters"
