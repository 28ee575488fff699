"""Ranks with nothing to do, checkpoints that change while they are read, and disks that are not ours to write to."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.distributed.checkpoint as dcp

import mcore_patch
from mcore_patch._stations import guard
from mcore_patch._stations.remember import memory

pytestmark = [pytest.mark.edges, pytest.mark.usefixtures("patched")]


class Model(tiny.MegatronModule):
    """One quantized weight, and a bf16 one."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(bf16=True))
        self.quantized = torch.nn.Parameter(tiny.Float8Tensor(torch.ones(4, 4)))
        self.plain = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))


def values(seed: int = 1) -> tiny.Tensors:
    seeded = torch.Generator().manual_seed(seed)
    return {"quantized": torch.randn(4, 4, generator=seeded), "plain": torch.randn(5, generator=seeded)}


def load(model: Model, folder: Path) -> None:
    model.load_state_dict(tiny.load_by_name(model.sharded_state_dict(), str(folder)))


def differing(optimizer: Any, wanted: tiny.Tensors, model: Model) -> dict[str, int]:
    found = {}
    for parameter, start, stop, main in tiny.masters_of(optimizer):
        name = next(name for name, each in model.named_parameters() if each is parameter)
        found[name] = int((main != wanted[name].reshape(-1)[start:stop]).sum())
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(dict(values()), checkpoint_id=tmp_path, no_dist=True)
    tiny.CHECKPOINTS[str(tmp_path)] = values()
    return tmp_path


def test_a_quantized_parameter_gets_what_lies_in_the_files(folder: Path) -> None:
    model = Model()
    optimizer = tiny.distributed(model)
    load(model, folder)
    optimizer.reload_model_params()
    assert differing(optimizer, values(), model) == {"quantized": 0, "plain": 0}


def test_a_rank_without_parameters_keeps_nothing_and_says_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    optimizer = tiny.distributed(model, rank=0, size=100)
    load(model, folder)
    with caplog.at_level(logging.DEBUG, "mcore_patch"):
        optimizer.reload_model_params()
        optimizer.load_state_dict({"param_state": []})
    assert list(tiny.masters_of(optimizer)) == []
    assert memory.empty
    assert mcore_patch.report() == ()
    assert caplog.records == []


def test_files_that_are_replaced_after_the_load_are_not_believed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    optimizer = tiny.distributed(model)
    shutil.rmtree(folder)
    dcp.save(dict(values(seed=2)), checkpoint_id=folder, no_dist=True)
    load(model, folder)
    optimizer.reload_model_params()
    as_loaded = {"quantized": model.quantized.float(), "plain": values()["plain"]}
    assert differing(optimizer, as_loaded, model) == {"quantized": 0, "plain": 0}
    assert warnings(caplog) == []


@pytest.mark.parametrize("damage", ["gone", "empty file", "key gone", "other shape", "no tensor"])
def test_files_that_are_damaged_after_the_load_leave_stocks_value_and_one_warning(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    optimizer = tiny.distributed(model)
    if damage == "empty file":
        for path in folder.glob("*.distcp"):
            path.write_bytes(b"")
    else:
        shutil.rmtree(folder)
    other: dict[str, Any] = {
        "key gone": {"plain": values()["plain"]},
        "other shape": values() | {"quantized": torch.ones(4, 5)},
        "no tensor": values() | {"quantized": {"a": "text"}},
    }
    if damage in other:
        dcp.save(other[damage], checkpoint_id=folder, no_dist=True)
    load(model, folder)
    optimizer.reload_model_params()
    as_loaded = {"quantized": model.quantized.float(), "plain": model.plain.float()}
    assert differing(optimizer, as_loaded, model)["quantized"] == 0
    # The step that failed is about all parameters of the load.
    assert 0 in (differing(optimizer, wanted, model)["plain"] for wanted in (as_loaded, values()))
    assert len(warnings(caplog)) == 1
    guard._said.clear()


CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")


class _Writes:
    """Every attempt to write to a file system, while it is on. A hook cannot be taken off."""

    def __init__(self) -> None:
        self.on, self.seen = False, []  # type: ignore[var-annotated]
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on:
            writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & writes
            if opened or event in CHANGES:
                self.seen.append((event, arguments))


WRITES = _Writes()


def test_nothing_is_written_anywhere(folder: Path) -> None:
    WRITES.on = True
    try:
        model = Model()
        optimizer = tiny.distributed(model)
        load(model, folder)
        optimizer.reload_model_params()
        mcore_patch.report()
        mcore_patch.status()
        assert WRITES.seen == []
        Path(folder, "control").write_text("")
        assert len(WRITES.seen) == 1, "the test sees no writes"
    finally:
        WRITES.on = False
        WRITES.seen.clear()


def test_revert_forgets_all_loads_and_leaves_no_hook(folder: Path) -> None:
    before = dict(torch.nn.modules.module._global_forward_pre_hooks)
    model = Model()
    load(model, folder)
    assert not memory.empty
    mcore_patch.revert()
    assert memory.empty
    assert dict(torch.nn.modules.module._global_forward_pre_hooks) == before
