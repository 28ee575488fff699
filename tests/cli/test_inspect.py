"""`mcore-patch inspect` on checkpoints that torch wrote, and on hostile ones."""

from __future__ import annotations

import collections
import json
import os
import pickle
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mcore_patch._cli import formats  # noqa: E402
from mcore_patch._cli.formats import Contents, NotACheckpoint  # noqa: E402
from mcore_patch._cli.inspect_checkpoint import describe, masters_from  # noqa: E402
from mcore_patch._cli.safe_pickle import ITEM_SIZES  # noqa: E402

Python = Callable[..., "subprocess.CompletedProcess[str]"]


class Hostile:
    """Unpickled as usual, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def summed(contents: Contents) -> dict[tuple[str, str | None], tuple[int, int, int]]:
    """Tensors, elements and bytes by kind and dtype."""
    sums: dict[tuple[str, str | None], tuple[int, int, int]] = {}
    for entry in contents.entries:
        tensors, elements, nbytes = sums.get((entry.kind, entry.dtype), (0, 0, 0))
        sums[entry.kind, entry.dtype] = (tensors + 1, elements + entry.elements, nbytes + entry.nbytes)
    return sums


# ------------------------------------------------------------------------------------------------ torch


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_torch_file(dtype: str, legacy: bool, tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(3, 5).to(getattr(torch, dtype)), "step": torch.tensor(3)}}
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=not legacy)
    contents = formats.read(tmp_path / "model.pt")
    assert contents.format == "torch"
    assert contents.refused == []
    assert summed(contents) == {("weights", dtype): (1, 15, 15 * ITEM_SIZES[dtype]), ("other", "int64"): (1, 1, 8)}


def test_parameters_views_and_ties_are_counted_once_each(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 2, bias=False)
    whole = torch.zeros(10)
    tree = collections.OrderedDict(a=module.weight, tied=module.weight, views=[whole[:4], whole[4:]], module={1: whole})
    torch.save(tree, tmp_path / "model.pt")
    contents = formats.read(tmp_path)
    assert {entry.key: entry.elements for entry in contents.entries} == {
        "a": 8,
        "views.0": 4,
        "views.1": 6,
        "module.1": 10,
    }


def test_item_sizes_are_torchs() -> None:
    for name, size in ITEM_SIZES.items():
        if hasattr(torch, name):
            assert torch.empty(0, dtype=getattr(torch, name)).element_size() == size


def test_the_latest_checkpoint_of_a_training_run(tmp_path: Path) -> None:
    for iteration, size in ((10, 1), (200, 2)):
        rank = tmp_path / f"iter_{iteration:07d}" / "mp_rank_00"
        rank.mkdir(parents=True)
        masters = {0: {(torch.bfloat16, torch.float32): [{"param": torch.zeros(size), "exp_avg": torch.zeros(size)}]}}
        torch.save({"model": {"w": torch.zeros(size)}, "args": None}, rank / "model_optim_rng.pt")
        torch.save(masters, rank / "distrib_optim.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("200\n")
    contents = formats.read(tmp_path)
    assert contents.path.name == "iter_0000200"
    kinds = {entry.kind: entry.elements for entry in contents.entries}
    assert kinds == {"weights": 2, "masters": 2, "optimizer": 2}


def test_what_megatron_lm_puts_beside_the_weights_is_known(tmp_path: Path) -> None:
    import argparse
    import random

    import numpy

    beside = {
        "args": argparse.Namespace(params_dtype=torch.bfloat16, path=Path("x"), shape=torch.Size([1])),
        "rng_state": [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": numpy.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
            }
        ],
    }
    torch.save({"model": {"w": torch.zeros(2)}, **beside}, tmp_path / "model_optim_rng.pt")
    contents = formats.read(tmp_path)
    assert contents.refused == []
    assert [entry.key for entry in contents.of("weights")] == ["model.w"]


# -------------------------------------------------------------------------------------------------- DCP


def test_a_dcp_directory(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {
        "w": torch.zeros(4, 4, dtype=torch.bfloat16),
        "optimizer": {"state": {"w": {"exp_avg": torch.zeros(4, 4)}}, "step": "an object"},
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    contents = formats.read(tmp_path)
    assert (contents.format, contents.refused) == ("DCP", [])
    found = summed(contents)
    assert found["weights", "bfloat16"] == (1, 16, 32)
    assert found["optimizer", "float32"] == (1, 16, 64)
    assert found["optimizer", None][:2] == (1, 0)
    assert found["optimizer", None][2] > 0


def test_a_metadata_file_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    assert "expected torch's Metadata, found dict" in formats.read(tmp_path).refused[0]


# ------------------------------------------------------------------------------------- zarr, safetensors


def test_a_zarr_directory(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    for key, dtype in (("decoder.w", "bfloat16"), ("optimizer.state.fp32_param.decoder.w", "<f4")):
        (tmp_path / key).mkdir()
        (tmp_path / key / ".zarray").write_text(json.dumps({"dtype": dtype, "shape": [2, 3]}))
        (tmp_path / f"{key}.sync").mkdir()
        (tmp_path / f"{key}.sync" / ".zarray").write_bytes(b"\0")
    (tmp_path / "decoder._extra_state").mkdir()
    (tmp_path / "decoder._extra_state" / "shard_0_1.pt").write_bytes(b"12345")
    contents = formats.read(tmp_path)
    assert contents.refused == []
    assert summed(contents) == {
        ("weights", "bfloat16"): (1, 6, 12),
        ("masters", "float32"): (1, 6, 24),
        ("other", None): (1, 0, 5),
    }


def safetensors(path: Path, header: dict[str, Any], data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_safetensors_directory(tmp_path: Path) -> None:
    safetensors(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt"}, "w": {"dtype": "BF16", "shape": [2]}})
    safetensors(tmp_path / "b.safetensors", {"v": {"dtype": "F8_E4M3", "shape": [3, 2]}})
    contents = formats.read(tmp_path)
    assert contents.format == "safetensors"
    assert summed(contents) == {("weights", "bfloat16"): (1, 2, 4), ("weights", "float8_e4m3fn"): (1, 6, 6)}


# -------------------------------------------------------------------------------- what cannot be trusted


@pytest.mark.parametrize("form", ["torch", "legacy", "pickle", "metadata", "in a tensor", "as a key", "protocol 0"])
def test_nothing_in_a_checkpoint_is_run(form: str, tmp_path: Path, command: Python) -> None:
    proof = tmp_path / "proof"
    tree: Any = {"w": torch.zeros(2), "hostile": Hostile(proof)}
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    if form in ("torch", "legacy"):
        torch.save(tree, checkpoint / "a.pt", _use_new_zipfile_serialization=form == "torch")
    elif form == "metadata":
        (checkpoint / ".metadata").write_bytes(pickle.dumps(Hostile(proof)))
    elif form == "in a tensor":
        tree["w"].hostile = Hostile(proof)
        torch.save({"w": torch.nn.Parameter(tree["w"]), "v": tree["w"]}, checkpoint / "a.pt")
    elif form == "as a key":
        torch.save({Hostile(proof): torch.zeros(2)}, checkpoint / "a.pt")
    else:
        (checkpoint / "a.pt").write_bytes(pickle.dumps(Hostile(proof), protocol=0 if form == "protocol 0" else 4))
    done = command("inspect", str(checkpoint))
    assert not proof.exists()
    assert done.returncode == 1, done.stderr
    assert f"refused {os.system.__module__}.system" in done.stdout
    if form in ("torch", "legacy"):
        assert "2 x float32" not in done.stdout
        assert "float32                1                  2" in done.stdout, "the rest is read"


BAD_PICKLES = {
    "a call of getattr": b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR.",
    "a dotted name": b"\x80\x04\x8c\x02os\x8c\x0bpath.system\x93.",
    "state for a class": b"\x80\x02ccollections\nOrderedDict\n}U\x0b__setstate__cos\nsystem\nsb.",
    "slots of a class": b"\x80\x02ccollections\nOrderedDict\nN}U\x0b__setstate__cos\nsystem\ns\x86b.",
    "an instance, protocol 0": b"(S'touch x'\nios\nsystem\n.",
    "an extension code": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02X\x03\x00\x00\x00abcQ.",
    "nothing": b"",
    "not a pickle": b"hello",
    "a ring": b"\x80\x02]q\x00h\x00a.",
    "deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
}

AUDITED = """\
import sys
from pathlib import Path
from mcore_patch._cli import formats
formats.read(Path("good.pt"))
seen = []
sys.addaudithook(lambda event, args: seen.append((event, str(args)[:80])))
for path in sorted(Path("bad").iterdir()):
    formats.read(path)
harmless = {"open", "os.listdir", "os.scandir", "pickle.find_class", "builtins.id"}
print([event for event in seen if event[0] not in harmless])
print("torch" in sys.modules)
"""


def test_bad_pickles_do_nothing(tmp_path: Path, python: Python) -> None:
    (tmp_path / "bad").mkdir()
    torch.save({"w": torch.zeros(1)}, tmp_path / "good.pt")
    for name, content in BAD_PICKLES.items():
        (tmp_path / "bad" / f"{name}.pt").write_bytes(content)
    done = python("-c", AUDITED)
    assert done.stdout == "[]\nFalse\n", done.stdout + done.stderr[-2000:]


def test_names_in_a_checkpoint_do_nothing_to_the_terminal(tmp_path: Path, command: Python) -> None:
    title, surrogate = b"\x8c\x08\x1b]0;a\x07\r\n", b"\x8c\x03\xed\xb2\x80"
    (tmp_path / "a.pt").write_bytes(b"\x80\x04" + title + surrogate + b"\x93)R.")
    done = command("inspect", "a.pt")
    assert done.returncode == 1, done.stderr
    assert r"refused \x1b]0;a\x07\r\n.\udc80:" in done.stdout
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("\x1b[2J")
    assert r"\x1b[2J" in command("inspect", ".").stderr


def test_one_broken_file_does_not_hide_the_others(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:100])
    contents = formats.read(tmp_path)
    assert len(contents.entries) == 1
    assert len(contents.refused) == 1
    assert contents.refused[0].startswith("b.pt: cannot be read:")


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{"])
def test_a_broken_safetensors_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    assert formats.read(tmp_path).refused[0].startswith("a.safetensors: cannot be read:")


def test_what_is_no_checkpoint(tmp_path: Path, command: Python) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotACheckpoint):
            formats.read(path)
        assert command("inspect", str(path)).returncode == 2
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(NotACheckpoint, match="iter_0000007"):
        formats.read(tmp_path)


# -------------------------------------------------------------------------------------------- predictions


@pytest.mark.parametrize("disk", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("params", ["bf16", "fp16", "fp32"])
def test_what_is_said_of_plain_parameters_is_what_the_stations_do(disk: str, params: Any) -> None:
    from mcore_patch._stations.parameters import loses

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[params]
    expected = params != "fp32" and loses(getattr(torch, disk), dtype)
    stock, patched, differs = masters_from(disk, params)
    assert differs == expected
    assert (stock != patched) == expected


def test_what_is_said_of_quantized_ones(tmp_path: Path) -> None:
    assert masters_from("bfloat16", "fp8")[2]
    assert not masters_from("float8_e4m3fn", "bf16")[2]
    torch.save({"w": torch.zeros(1000, dtype=torch.bfloat16)}, tmp_path / "a.pt")
    contents = formats.read(tmp_path)
    assert "The patch makes no difference." in describe(contents, "bf16")
    assert "The patch makes a difference for up to 1,000 elements." in describe(contents, "fp8")


def test_progress_goes_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mcore_patch._cli import inspect_checkpoint

    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(inspect_checkpoint.time, "monotonic", lambda: next(clock))
    for index in range(3):
        torch.save({"w": torch.zeros(1)}, tmp_path / f"{index}.pt")
    progress = inspect_checkpoint._Progress()
    formats.read(tmp_path, progress)
    progress.end()
    assert "reading metadata: 1 of 3 (33 %)" in capsys.readouterr().err
