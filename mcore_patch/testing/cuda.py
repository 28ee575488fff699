"""``torch.cuda`` on a machine without a GPU: every answer is the CPU's.

megatron-core asks for ``torch.cuda.current_device()``, ``device="cuda"``, ``Tensor.cuda()`` and ``Tensor.type()``
without looking whether there is a GPU. Two things make it run on a CPU, with the numbers of any CPU code:

* the functions of ``torch.cuda`` that it calls are replaced by ones that answer for the CPU;
* a torch function mode (what ``torch.set_default_device`` is made of) turns a CUDA device in any call of torch into
  the CPU. The mode belongs to the thread that installed it and to processes forked from that thread.

``torch.cuda.is_available()`` keeps telling the truth.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _on_cpu(device: object) -> object:
    """*device*, or the CPU if *device* is a GPU: ``"cuda"``, ``"cuda:1"``, a CUDA ``torch.device``, an index."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    is_cuda = isinstance(device, str) and device.startswith("cuda")
    is_cuda_device = isinstance(device, torch.device) and device.type == "cuda"
    return _CPU if is_index or is_cuda or is_cuda_device else device


class _CpuForCuda(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        # Pinned memory needs a driver; HybridDeviceOptimizer asks for it.
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        result = func(*args, **kwargs)
        # The optimizers compare these strings to "torch.cuda.FloatTensor" and the like.
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def _done(self, *_: Any, **__: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = _done

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Event:
    """An event that has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _done(self, *_: Any, **__: Any) -> None:
        return None

    record = wait = synchronize = _done

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: _Event) -> float:
        return 0.0


class _Generators:
    """The CPU's generator, whatever device is asked for: the numbers are drawn there."""

    def __getitem__(self, _: object) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


_STREAM = _Stream()


def _answer(value: Any) -> Callable[..., Any]:
    def answer(*_: Any, **__: Any) -> Any:
        return value

    return answer


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def _get_rng_state_all() -> list[torch.Tensor]:
    return [torch.default_generator.get_state()]


def _set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    torch.default_generator.set_state(new_state)


def _set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        torch.default_generator.set_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _lazy_call(callable: Callable[[], Any], **_: Any) -> None:
    callable()


_RNG: dict[str, Callable[..., Any]] = {
    "get_rng_state": _get_rng_state,
    "get_rng_state_all": _get_rng_state_all,
    "set_rng_state": _set_rng_state,
    "set_rng_state_all": _set_rng_state_all,
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed,
    "initial_seed": lambda: torch.default_generator.initial_seed(),
}

_NOTHING = (
    "set_device",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "set_stream",
    "init",
    "_lazy_init",
    "_sleep",
)
_NO_MEMORY = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "utilization",
    "temperature",
    "power_draw",
    "clock_rate",
)


def stand_in_for_cuda() -> None:
    """Makes ``torch.cuda`` and CUDA devices mean the CPU in this thread, and in processes forked from it.

    Call it before ``megatron`` is imported: megatron-core binds ``torch.cuda`` functions by name. Calling it again
    does nothing. There is no way back; a test that wants one runs in a process of its own.
    """
    cuda: Any = torch.cuda
    if isinstance(cuda.default_generators, _Generators):
        return
    cuda.default_generators = _Generators()
    for name in _NOTHING:
        setattr(cuda, name, _answer(None))
    for name in _NO_MEMORY:
        setattr(cuda, name, _answer(0))
    for name, function in _RNG.items():
        setattr(cuda, name, function)
        setattr(cuda.random, name, function)
    cuda._lazy_call = _lazy_call
    cuda.random._lazy_call = _lazy_call
    cuda.random.default_generators = cuda.default_generators
    # Callers pass the answer on as a device, so a device it is, not an index.
    cuda.current_device = _answer(_CPU)
    cuda.device_count = _answer(1)
    cuda.memory_stats = lambda *_: {}
    cuda.mem_get_info = _answer((0, 0))
    cuda.get_device_name = _answer("cpu")
    cuda.get_device_capability = _answer((8, 0))
    # 0.15 compiles an extension on import, and bears that it fails, but not with the ValueError of torch 2.9 over [].
    cuda.get_arch_list = _answer(["sm_80"])
    cuda.get_device_properties = _answer(
        SimpleNamespace(name="cpu", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1)
    )
    cuda.is_current_stream_capturing = _answer(False)
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.current_stream = _answer(_STREAM)
    cuda.default_stream = _answer(_STREAM)
    cuda.stream = lambda stream: contextlib.nullcontext(stream)
    cuda.device = lambda device: contextlib.nullcontext(device)
    # megatron-core warns when drawing on "the GPU" has moved the CPU's generator: here it is the same one.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    mode: Any = _CpuForCuda()
    mode.__enter__()
