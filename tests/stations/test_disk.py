"""Single shards, read from real files at the dtype on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from mcore_patch._stations import disk

pytestmark = pytest.mark.skipif(not hasattr(checkpoint, "save"), reason="saving without ranks has come in torch 2.2")


class Shard:
    """What is read of a ShardedTensor."""

    def __init__(
        self,
        key: str,
        shape: tuple[int, ...],
        whole: tuple[int, ...] | None = None,
        offset: tuple[int, ...] | None = None,
        stacked: int = 0,
    ) -> None:
        self.key, self.local_shape, self.prepend_axis_num = key, shape, stacked
        self.global_shape = shape if whole is None else whole
        self.global_offset = (0,) * len(self.global_shape) if offset is None else offset


TENSORS = {
    "half": torch.arange(6.0).half().view(2, 3),
    "double": torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "stacked": torch.arange(24, dtype=torch.bfloat16).view(4, 2, 3),
    "wide": torch.arange(8.0),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    objects = {"object": {"a": "text"}}
    checkpoint.save({**TENSORS, **objects}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_each_shard_has_its_values_its_shape_and_the_dtype_on_disk(folder: Path) -> None:
    shards = [
        Shard("half", (2, 3)),
        Shard("double", (2, 3), whole=(4, 3), offset=(2, 0)),
        Shard("stacked", (2, 3), whole=(4, 2, 3), offset=(1, 0, 0), stacked=1),
        Shard("stacked", (2, 3), whole=(4, 2, 3), offset=(3, 0, 0), stacked=1),
        Shard("wide", (8,)),
    ]
    wanted = [TENSORS["half"], TENSORS["double"][2:], TENSORS["stacked"][1], TENSORS["stacked"][3], TENSORS["wide"]]
    for found, want in zip(disk.read(folder, shards), wanted, strict=True):
        assert found.dtype is want.dtype
        assert torch.equal(found, want)


@pytest.mark.parametrize(
    "shard, error, text",
    [
        (Shard("gone", (2,)), KeyError, "gone"),
        (Shard("half", (3, 2)), ValueError, r"half: expected a tensor of shape \(3, 2\), found torch.Size\(\[2, 3\]\)"),
        (
            Shard("object.a", (2,)),
            ValueError,
            r"object.a: .* shape \(2,\), found BytesStorageMetadata",
        ),
    ],
    ids=["no such key", "another shape", "not a tensor"],
)
def test_what_is_not_there_is_told(folder: Path, shard: Shard, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        disk.read(folder, [shard])


def test_dtypes_are_those_of_the_tensors(folder: Path) -> None:
    assert disk.dtypes(folder) == {key: tensor.dtype for key, tensor in TENSORS.items()}


def test_the_plan_has_the_shards_and_no_more(folder: Path) -> None:
    metadata = checkpoint.FileSystemReader(folder).read_metadata()
    assert isinstance(metadata.state_dict_metadata["wide"], TensorStorageMetadata)
    plan = disk._Shards(metadata, [Shard("wide", (8,)), Shard("half", (2, 3))]).create_local_plan()
    assert [(item.type, item.dest_index.fqn) for item in plan.items] == [
        (LoadItemType.TENSOR, "wide"),
        (LoadItemType.TENSOR, "half"),
    ]
