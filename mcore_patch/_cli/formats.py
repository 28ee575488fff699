"""What lies in a checkpoint, from its metadata alone: no tensor is read, and nothing in it is run.

Needs neither torch nor megatron-core. The formats, and where each keeps its metadata:

* `torch_dist` (megatron-core) and DCP (torch.distributed.checkpoint): the pickle `.metadata`;
* `zarr` (megatron-core up to 0.15): `.zarray`, JSON, in every tensor's directory;
* `torch`: the pickle inside each `.pt` file, which `torch.save` wrote;
* `safetensors`: the JSON header of each file.
"""

from __future__ import annotations

import io
import json
import math
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from .safe_pickle import ITEM_SIZES, Made, Unpickler, name_of, shape_of, tensors_in

Kind = Literal["weights", "masters", "optimizer", "other"]

Tell = Callable[[int, int], None]
"""Called with what is done and what there is to do: bytes of a pickle, or files."""

_TRACKER = "latest_checkpointed_iteration.txt"
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_ZARR = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "bfloat16": "bfloat16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u1": "uint8",
    "b1": "bool",
}

_OPTIMIZER_KEY = re.compile(r"(^|\.)(optim|optimizer|optimizer_state|exp_avg|exp_avg_sq|buckets_coalesced)(\.|$)")
_MASTER_KEY = re.compile(r"(^|\.)(param|fp32_param|master_param|param_state|fp32_from_fp16_params|main_param)(\.|/|$)")
_NO_WEIGHTS = re.compile(r"^(rng_state|rerun_state_machine|args|iteration|opt_param_scheduler|lr_scheduler)(\.|$)")


class NotACheckpoint(Exception):
    """Nothing that could be read as a checkpoint; the text says what was found, and what was expected."""


@dataclass(frozen=True)
class Entry:
    """One tensor, or one object whose dtype nobody can tell from outside (`dtype` None, no `elements`)."""

    key: str
    kind: Kind
    dtype: str | None
    elements: int
    nbytes: int


@dataclass
class Contents:
    """What was found. `refused` are sentences on what was not read: classes, and files that are broken."""

    path: Path
    format: str
    entries: list[Entry] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def of(self, kind: Kind) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]


def read(path: Path, tell: Tell = lambda done, of: None) -> Contents:
    """Read the metadata of the checkpoint at `path`, a file or a directory.

    A directory of checkpoints, as Megatron-LM writes them, stands for its latest. Raises NotACheckpoint.
    """
    try:
        return _read(_checkpoint_at(path), tell)
    except OSError as error:
        raise NotACheckpoint(f"{path}: cannot be read: {error}") from error


def _checkpoint_at(path: Path) -> Path:
    if not path.exists():
        raise NotACheckpoint(f"{path}: there is no such file or directory")
    if (path / _TRACKER).is_file():
        latest = (path / _TRACKER).read_text().strip()
        path = path / (f"iter_{int(latest):07d}" if latest.isdigit() else latest)
        if not path.is_dir():
            raise NotACheckpoint(f"{path}: named by {_TRACKER}, but there is no such directory")
    for weights in ("weights", "model_weights"):  # NeMo 2 and 1 keep the distributed checkpoint in there
        if any((path / weights / name).is_file() for name in (".metadata", "metadata.json")):
            return path / weights
    return path


def _read(path: Path, tell: Tell) -> Contents:
    if path.is_file():
        contents = Contents(path, "safetensors" if path.suffix == ".safetensors" else "torch")
        _read_files(contents, [path], tell)
        return contents
    backend = _backend(path)
    if (path / ".metadata").is_file():
        contents = Contents(path, backend or "DCP")
        _guarded(contents, path / ".metadata", partial(_read_metadata, contents=contents, tell=tell))
        return contents
    if backend == "zarr":
        contents = Contents(path, "zarr")
        _read_zarr(contents, tell)
        return contents
    files = sorted(path.rglob("*.safetensors")) or sorted(f for f in path.rglob("*") if f.suffix in _TORCH_FILES)
    if not files:
        raise NotACheckpoint(
            f"{path}: found none of .metadata (torch_dist, DCP), metadata.json (zarr), *.safetensors, "
            f"*{', *'.join(_TORCH_FILES)} (torch); expected a checkpoint, or a directory with {_TRACKER}"
        )
    contents = Contents(path, "safetensors" if files[0].suffix == ".safetensors" else "torch")
    _read_files(contents, files, tell)
    return contents


def _backend(path: Path) -> str | None:
    """The format that megatron-core's `metadata.json` names."""
    try:
        backend = json.loads((path / "metadata.json").read_bytes())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(backend)


def _read_files(contents: Contents, files: list[Path], tell: Tell) -> None:
    for index, path in enumerate(files):
        tell(index, len(files))
        if contents.format == "safetensors":
            _guarded(contents, path, partial(_read_safetensors, contents=contents))
        else:
            _guarded(contents, path, partial(_read_torch, contents=contents))
    tell(len(files), len(files))


def _guarded(contents: Contents, path: Path, reader: Callable[[IO[bytes], list[str]], None]) -> None:
    """Read one file; what is refused or broken is noted, and the next one is read."""
    name = path.name if path.parent == contents.path or path == contents.path else str(path.relative_to(contents.path))
    refused: list[str] = []
    try:
        with path.open("rb") as file:
            reader(file, refused)
    # A pickle can make Python raise nearly anything, MemoryError and RecursionError included.
    except Exception as error:
        contents.refused.append(f"{name}: cannot be read: {type(error).__name__}: {error}")
    contents.refused += [
        f"{name}: refused {each}: checkpoints are not known to hold it; it was neither imported nor called, and what "
        "is in its objects is not counted"
        for each in refused
    ]


# ------------------------------------------------------------------------------------- torch_dist, DCP


def _read_metadata(file: IO[bytes], refused: list[str], *, contents: Contents, tell: Tell) -> None:
    metadata = Unpickler(io.BufferedReader(_Told(file, tell), 1 << 20), refused).load()
    if name_of(metadata) != "torch.distributed.checkpoint.metadata.Metadata":
        raise ValueError(f"expected torch's Metadata, found {name_of(metadata) or type(metadata).__name__}")
    lengths = _lengths(metadata.attributes.get("storage_data"))
    for key, stored in metadata.attributes["state_dict_metadata"].items():
        if "properties" in stored.attributes:
            dtype = _dtype_of(stored.attributes["properties"])
            contents.entries.append(_tensor_entry(key, dtype, shape_of(stored.attributes["size"])))
        else:
            contents.entries.append(_object_entry(key, lengths.get(key, 0)))


def _dtype_of(properties: Made) -> str:
    state = properties.state  # a tuple since torch 2.0, in which the dtype comes first
    dtype = state[0] if isinstance(state, tuple) else properties.attributes.get("dtype")
    return name_of(dtype).removeprefix("torch.") or "unknown"


def _lengths(storage_data: Any) -> dict[str, int]:
    """Bytes on disk by key, where the storage tells them."""
    lengths: dict[str, int] = {}
    for index, place in storage_data.items() if isinstance(storage_data, dict) else ():
        key, length = index.attributes.get("fqn"), place.attributes.get("length")
        if isinstance(key, str) and isinstance(length, int):
            lengths[key] = lengths.get(key, 0) + length
    return lengths


class _Told(io.RawIOBase):
    """A file that tells how far it has been read."""

    def __init__(self, file: IO[bytes], tell: Tell) -> None:
        self._file, self._tell = file, tell
        self._size = file.seek(0, 2)
        file.seek(0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._tell(self._file.tell(), self._size)
        return len(data)


# ------------------------------------------------------------------------------------------------ zarr


def _read_zarr(contents: Contents, tell: Tell) -> None:
    # A folder `<key>.sync` holds the locks that the ranks wrote the array `<key>` under.
    folders = sorted(folder for folder in contents.path.iterdir() if folder.is_dir() and folder.suffix != ".sync")
    for index, folder in enumerate(folders):
        tell(index, len(folders))
        array = folder / ".zarray"
        if array.is_file():
            _guarded(contents, array, partial(_read_zarray, key=folder.name, contents=contents))
        elif shards := list(folder.glob("shard_*.pt")):  # an object, one file per rank
            contents.entries.append(_object_entry(folder.name, sum(shard.stat().st_size for shard in shards)))
    tell(len(folders), len(folders))


def _read_zarray(file: IO[bytes], _refused: list[str], *, key: str, contents: Contents) -> None:
    described = json.load(file)
    dtype = _ZARR.get(str(described["dtype"]).lstrip("<>|="), str(described["dtype"]))
    contents.entries.append(_tensor_entry(key, dtype, shape_of(described["shape"])))


# ---------------------------------------------------------------------------------- torch, safetensors


def _read_torch(file: IO[bytes], refused: list[str], *, contents: Contents) -> None:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            found = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
            if not found:
                raise ValueError(f"expected data.pkl, as torch.save writes it, found {archive.namelist()[:3]}")
            with archive.open(found[0]) as pickled:
                tree = Unpickler(pickled, refused).load()
    else:
        file.seek(0)
        tree = Unpickler(file, refused).load()
        if tree == _LEGACY_MAGIC:  # torch.save before 1.6: magic number, protocol, system, then the object
            for _ in range(3):
                tree = Unpickler(file, refused).load()
    seen: set[tuple[Any, ...]] = set()
    for path, tensor in tensors_in(tree):
        if tensor.place not in seen:  # a tied tensor has two names and one place
            seen.add(tensor.place)
            contents.entries.append(_tensor_entry(".".join(path), tensor.dtype, tensor.shape))


_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


def _read_safetensors(file: IO[bytes], _refused: list[str], *, contents: Contents) -> None:
    size = file.seek(0, 2)
    file.seek(0)
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if length > size - 8:
        raise ValueError(f"expected a header, found one of {length} bytes in a file of {size}")
    header = json.loads(file.read(length))
    for key, tensor in header.items():
        if key != "__metadata__":
            dtype = _SAFETENSORS.get(tensor["dtype"], tensor["dtype"])
            contents.entries.append(_tensor_entry(key, dtype, shape_of(tensor["shape"])))


# -------------------------------------------------------------------------------------------- entries


def _tensor_entry(key: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    elements = math.prod(shape)
    return Entry(key, _kind(key, dtype), dtype, elements, elements * ITEM_SIZES.get(dtype, 0))


def _object_entry(key: str, nbytes: int) -> Entry:
    kind = _kind(key, None)
    return Entry(key, "other" if kind == "weights" else kind, None, 0, nbytes)


def _kind(key: str, dtype: str | None) -> Kind:
    """What a tensor is, by its name.

    A number comes first in the names of `distrib_optim.pt`: the distributed optimizer's buffers, with their masters.
    """
    if _OPTIMIZER_KEY.search(key) or key.partition(".")[0].isdigit():
        return "masters" if _MASTER_KEY.search(key) else "optimizer"
    if _NO_WEIGHTS.match(key) or (dtype is not None and "float" not in dtype):
        return "other"
    return "weights"
