"""Read a pickle without running any of it.

Nothing that a pickle names is imported or called. Every class and function in it becomes a class made here, whose
objects only hold what the pickle gave them. Names that checkpoints are known to hold are in `KNOWN`; any other is
refused: it is listed, and what its objects hold is not looked at.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""torch's typed storages and their dtypes."""

ITEM_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "complex128": 16,
    "complex64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element by the name of the dtype."""

KNOWN: dict[str, frozenset[str]] = {
    module: frozenset(names.split())
    for module, names in {
        "builtins": "bool bytearray complex dict float frozenset int list object range set slice str tuple",
        "collections": "Counter OrderedDict defaultdict deque",
        "_codecs": "encode",
        "copyreg": "_reconstructor",
        "argparse": "Namespace",
        "types": "SimpleNamespace",
        "io": "BytesIO",
        "datetime": "date datetime timedelta timezone",
        "pathlib": "Path PosixPath PurePath PurePosixPath WindowsPath",
        "pathlib._local": "Path PosixPath PurePath PurePosixPath WindowsPath",
        "signal": "Signals",
        "numpy": "dtype ndarray",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.multiarray": "_reconstruct scalar",
        "torch": " ".join(["Size Tensor Generator device", *STORAGES, *ITEM_SIZES]),
        "torch.storage": "TypedStorage UntypedStorage _load_from_bytes",
        "torch.serialization": "_get_layout",
        "torch.nn.parameter": "Buffer Parameter",
        "torch._tensor": "_rebuild_from_type_v2",
        "torch._utils": (
            "_rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy "
            "_rebuild_meta_tensor_no_storage _rebuild_parameter _rebuild_parameter_with_state _rebuild_qtensor "
            "_rebuild_sparse_tensor _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_wrapper_subclass"
        ),
        "torch.distributed.checkpoint.metadata": (
            "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
            "TensorStorageMetadata _MEM_FORMAT_ENCODING"
        ),
        "torch.distributed.checkpoint.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
        "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING TensorProperties",
        "torch.distributed.tensor": "DTensor DeviceMesh Partial Replicate Shard",
        "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta",
        "torch.distributed.tensor.placement_types": "Partial Replicate Shard",
        "torch.distributed.device_mesh": "DeviceMesh",
        "megatron.core.enums": "Fp4Recipe Fp8Recipe ModelType",
        "megatron.core.transformer.enums": (
            "AttnBackend AttnMaskType AttnType CudaGraphScope LayerType ModelType MoEAuxLossType"
        ),
        "megatron.core.transformer.pipeline_parallel_layer_layout": "PipelineParallelLayerLayout",
        "megatron.core.rerun_state_machine": (
            "QuickStats RerunDataIterator RerunDiagnostic RerunErrorInjector RerunMode RerunState RerunStateMachine"
        ),
        "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    }.items()
}
"""The names that are not refused, by module. None of them is imported."""


class Made:
    """An object as the pickle describes it: what it was made from, and what was put into it afterwards."""

    pickled_name = ""
    refused = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Made:
        self = super().__new__(cls)
        self.args, self.state = args, kwargs
        self.elements, self.pairs = [], []
        return self

    args: tuple[Any, ...]
    state: Any
    elements: list[Any]
    pairs: list[tuple[Any, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is kept by `__new__`, which a pickle may call alone."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))

    def append(self, element: Any) -> None:
        self.elements.append(element)

    def extend(self, elements: list[Any]) -> None:
        self.elements.extend(elements)

    add = append

    @property
    def attributes(self) -> dict[str, Any]:
        """The object's attributes, where the pickle gives them in the usual way."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True)
class Storage:
    """What a pickle says of a storage, whose bytes lie elsewhere. `dtype` is None where they are untyped."""

    key: str
    dtype: str | None


@dataclass(frozen=True)
class Tensor:
    """What a pickle says of a tensor. `place` is equal for two names of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    place: tuple[Any, ...]


class Unpickler(pickle.Unpickler):
    """An unpickler that makes nothing but `Made` objects and Python's own literals and containers.

    To `refused` it adds the names, `module.name`, that it meets and that are not in `KNOWN`.
    """

    def __init__(self, file: IO[bytes], refused: list[str]) -> None:
        super().__init__(file)
        self._refused = refused
        self._made: dict[str, type[Made]] = {}

    def find_class(self, module: str, name: str) -> type[Made]:
        full = f"{module}.{name}"
        if full not in self._made:
            refused = name not in KNOWN.get(module, ())
            if refused:
                self._refused.append(full)
            # New classes for every pickle: it may set attributes on what it names.
            self._made[full] = type("Made", (Made,), {"pickled_name": full, "refused": refused})
        return self._made[full]

    def persistent_load(self, pid: Any) -> Any:
        """torch's reference to a storage: ("storage", class, key, location, elements, ...)."""
        try:
            _, kind, key = pid[:3]
            return Storage(str(key), STORAGES.get(name_of(kind).rpartition(".")[2]))
        except (TypeError, ValueError):
            return None


def name_of(thing: Any) -> str:
    """The name that a pickle gives for a class, or for the class of an object; "" for anything else."""
    if isinstance(thing, Made):
        return thing.pickled_name
    return thing.pickled_name if isinstance(thing, type) and issubclass(thing, Made) else ""


def tensors_in(tree: Any) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Every tensor in what was unpickled with its path: dict keys, list indices, attribute names.

    Raises ValueError where things lie in each other deeper than in any checkpoint.
    """
    waiting: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    seen: set[int] = set()
    while waiting:
        path, thing = waiting.pop()
        if not isinstance(thing, dict | list | tuple | set | frozenset | Made) or id(thing) in seen:
            continue
        tensor = _tensor(name_of(thing), thing.args) if isinstance(thing, Made) else None
        if tensor is not None:
            yield path, tensor
            continue
        if len(path) > _DEEPEST:
            raise ValueError(f"things in it lie more than {_DEEPEST} deep in each other")
        seen.add(id(thing))
        waiting += reversed([((*path, *step), inner) for step, inner in _inside(thing)])


_DEEPEST = 1000


def _inside(thing: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What lies in a container or an object, each with what it adds to the path."""
    if isinstance(thing, dict):
        yield from (((_step(key),), value) for key, value in thing.items())
    elif not isinstance(thing, Made):
        yield from (((str(index),), value) for index, value in enumerate(thing))
    elif not thing.refused:
        yield from (((_step(key),), value) for key, value in thing.pairs)
        yield from (((str(index),), value) for index, value in enumerate(thing.elements))
        yield from (((), value) for value in (*thing.args, thing.state))


def _step(key: Any) -> str:
    if isinstance(key, tuple):
        return f"({', '.join(map(_step, key))})"
    return name_of(key) or str(key)


def _tensor(function: str, args: tuple[Any, ...]) -> Tensor | None:
    """The tensor that a call of one of torch's rebuilding functions stands for."""
    if function == "torch._tensor._rebuild_from_type_v2" and len(args) > 2 and isinstance(args[2], tuple):
        return _tensor(name_of(args[0]), args[2])
    if not function.startswith("torch._utils._rebuild_tensor") or len(args) < 4 or not isinstance(args[0], Storage):
        return None
    storage, offset, size, stride = args[:4]
    dtype = name_of(args[6]).removeprefix("torch.") if function.endswith("_v3") and len(args) > 6 else storage.dtype
    return Tensor(dtype or "unknown", shape_of(size), (storage.key, offset, shape_of(size), shape_of(stride)))


def shape_of(size: Any) -> tuple[int, ...]:
    """A shape from a pickled `torch.Size`, or from a tuple. Raises ValueError for anything else."""
    if isinstance(size, Made) and len(size.args) == 1:
        size = size.args[0]
    if isinstance(size, tuple | list) and all(isinstance(length, int) for length in size):
        return tuple(size)
    raise ValueError(f"expected a shape, found {type(size).__name__}")
