"""What is done at each target. The only place where the patch engine and the stations meet.

Each entry takes the original function and the release line, and gives the wrapper, which gets exactly the arguments
of the call. Modules that need torch are imported inside: a wrapper is made when the target's module is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_patch.compat import ReleaseLine

Function = Callable[..., Any]


def _module_load_state_dict(original: Function, _line: ReleaseLine) -> Function:
    from mcore_patch._stations.modules import loading

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        with loading(self):
            return original(self, *args, **kwargs)

    return load_state_dict


def _module_leaf_load(original: Function, _line: ReleaseLine) -> Function:
    from mcore_patch._stations.modules import about_to_load_leaf, leaf_loaded

    def load_from_state_dict(self: Any, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
        about_to_load_leaf(self)
        original(self, state_dict, prefix, *args, **kwargs)
        leaf_loaded(self, state_dict, prefix)

    return load_from_state_dict


def _module_apply(original: Function, _line: ReleaseLine) -> Function:
    from mcore_patch._stations.remember import memory

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if memory.empty:
            return original(self, *args, **kwargs)
        with memory.let_go(self.parameters()):
            return original(self, *args, **kwargs)

    return apply


def _dist_load(original: Function, _line: ReleaseLine) -> Function:
    from mcore_patch._stations import load

    def dist_load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        found = load.targets(sharded_state_dict)
        result = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        # With a `strict` mode that returns mismatches, upstream returns (state dict, missing, unexpected).
        load.remember(found, result[0] if isinstance(result, tuple) else result, checkpoint_dir)
        return result

    return dist_load


def _strategy_load(original: Function, *, delegates: bool = False) -> Function:
    from mcore_patch._stations.load import through_strategy

    def strategy_load(self: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        return through_strategy(original, self, sharded_state_dict, checkpoint_dir, args, kwargs, delegates=delegates)

    return strategy_load


def _torch_dist_load(original: Function, _line: ReleaseLine) -> Function:
    return _strategy_load(original)


def _fully_parallel_load(original: Function, _line: ReleaseLine) -> Function:
    return _strategy_load(original, delegates=True)


def _tensorstore_load(original: Function, _line: ReleaseLine) -> Function:
    from mcore_patch._stations.load import through_strategy

    def tensorstore_load(self: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.load_directly_on_device:  # returns new tensors at the dtype on disk, and leaves the targets alone
            return original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
        return through_strategy(original, self, sharded_state_dict, checkpoint_dir, args, kwargs, own_targets=False)

    return tensorstore_load


def _two_stage_load(original: Function, _line: ReleaseLine) -> Function:
    from mcore_patch._stations.load import through_strategy

    def two_stage_load(self: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        return through_strategy(original, self, sharded_state_dict, checkpoint_dir, args, kwargs, own_targets=False)

    return two_stage_load


def _optimizer_init(original: Function, _line: ReleaseLine) -> Function:
    from mcore_patch._stations import masters
    from mcore_patch._stations.guard import standing_aside
    from mcore_patch._stations.quantized import drop_spent_initial_values
    from mcore_patch._stations.remember import memory

    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # Masters of an earlier optimizer over the same model are the only place left that holds the checkpoint's
        # values; building another one must not be what frees them.
        alive: list[Any] = []
        with standing_aside("preparing parameters for another optimizer"):
            alive = memory.settled_optimizers()
            for chunk in signature.bind(self, *args, **kwargs).arguments.get("model_chunks", ()):
                drop_spent_initial_values(chunk.parameters())
        original(self, *args, **kwargs)
        if not memory.empty:
            masters.write(self, "optimizer built", masters.keep_settled(self), reloaded=True)
        del alive

    return init


def _optimizer_copy(original: Function, line: ReleaseLine) -> Function:
    from mcore_patch._stations import masters, reload

    def copy_model_params_to_main_params(self: Any, state_dict: Any = None) -> None:
        with reload.given(self, state_dict, line):
            kept = masters.keep_settled(self)
            original(self)
            masters.write(self, "reload_model_params", kept, reloaded=True)

    return copy_model_params_to_main_params


def _distributed_load(original: Function, _line: ReleaseLine) -> Function:
    from mcore_patch._stations import masters

    def load_state_dict(self: Any, state_dict: Any) -> None:
        if "param_state" in state_dict:
            original(self, state_dict)
            masters.restored(self, "optimizer.load_state_dict")
        else:
            kept = masters.keep_settled(self)
            original(self, state_dict)
            masters.write(self, "optimizer.load_state_dict", kept, reloaded=False)

    return load_state_dict


def _float16_load(original: Function, _line: ReleaseLine) -> Function:
    from mcore_patch._stations import masters

    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)  # raises where the state dict has no masters
        masters.restored(self, "optimizer.load_state_dict")

    return load_state_dict


def _distributed_load_dp_zero(original: Function, _line: ReleaseLine) -> Function:
    from mcore_patch._stations import masters

    def load_parameter_state_from_dp_zero(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        masters.restored(self, "load_parameter_state")
        return result

    return load_parameter_state_from_dp_zero


def _reload(original: Function, line: ReleaseLine) -> Function:
    from mcore_patch._stations import masters, reload

    def reload_model_params(self: Any, state_dict: Any = None) -> None:
        with reload.given(self, state_dict, line):
            reload.each(original, self, state_dict)
            masters.release(self)
            masters.leave(self, "reload_model_params")

    return reload_model_params


def _layer_wise_init(original: Function, _line: ReleaseLine) -> Function:
    from mcore_patch._stations import masters

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)  # builds optimizers that write their own masters
        masters.release(self)

    return init


def _layer_wise_load(original: Function, _line: ReleaseLine) -> Function:
    from mcore_patch._stations import masters

    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        masters.release(self)

    return load_state_dict


WRAPPERS: dict[str, Callable[[Function, ReleaseLine], Function]] = {
    "module_load_state_dict": _module_load_state_dict,
    "module_leaf_load": _module_leaf_load,
    "module_apply": _module_apply,
    "dist_load": _dist_load,
    "torch_dist_load": _torch_dist_load,
    "fully_parallel_load": _fully_parallel_load,
    "tensorstore_load": _tensorstore_load,
    "two_stage_load": _two_stage_load,
    "distributed_optimizer_init": _optimizer_init,
    "distributed_optimizer_copy": _optimizer_copy,
    "distributed_optimizer_load": _distributed_load,
    "distributed_optimizer_load_dp_zero": _distributed_load_dp_zero,
    "float16_optimizer_init": _optimizer_init,
    "float16_optimizer_copy": _optimizer_copy,
    "float16_optimizer_load": _float16_load,
    "layer_wise_init": _layer_wise_init,
    "layer_wise_load": _layer_wise_load,
    "mixed_precision_reload": _reload,
    "fp32_reload": _reload,
    "chained_reload": _reload,
}
