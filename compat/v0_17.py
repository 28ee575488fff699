"""What was checked in megatron-core 0.17. Drafted by scripts/release_line.py."""

from __future__ import annotations

from ._schema import Checked, Pair, Quirks, ReleaseLine

LINE = ReleaseLine(
    name="0.17",
    releases=("0.17.0", "0.17.1"),
    pythons=("3.12", "3.13"),
    torch="2.11.0",
    numpy_2=True,
    native="As 0.16, but names are found by suffix.",
    quirks=Quirks(
        reload_accepts_state_dict=True,
        zarr=False,
        state_dict_normalizers=(),
    ),
    targets={
        "dist_load": Checked(
            signatures=(
                (
                    "(sharded_state_dict, checkpoint_dir, sharded_strategy=, common_strategy=, "
                    "validate_access_integrity=, strict=)"
                ),
                (
                    "(sharded_state_dict, checkpoint_dir, sharded_strategy=, common_strategy=, "
                    "validate_access_integrity=, strict=, verify_integrity=)"
                ),
            ),
            fingerprints={
                "fe3d2fd3663a289b": ("0.17.0",),
                "0cd0fb909d1279e7": ("0.17.1",),
            },
        ),
        "torch_dist_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir, async_strategy=)",),
            fingerprints={
                "5c207b059f03436e": ("0.17.0",),
                "cb5f5adee14e6758": ("0.17.1",),
            },
        ),
        "fully_parallel_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir, async_strategy=)",),
            fingerprints={
                "5dd92e5821e25321": ("0.17.0",),
                "496d81183b21a955": ("0.17.1",),
            },
        ),
        "distributed_optimizer_init": Checked(
            signatures=(
                (
                    "(self, optimizer, config, grad_scaler, init_state_fn, model_chunks, per_model_buffers, "
                    "data_parallel_group, data_parallel_group_gloo, data_parallel_group_idx, "
                    "distributed_optimizer_instance_id)"
                ),
            ),
            fingerprints={
                "35cacd2509629df8": ("0.17.0", "0.17.1"),
            },
        ),
        "distributed_optimizer_copy": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "0ddec296cedea78f": ("0.17.0", "0.17.1"),
            },
        ),
        "distributed_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "862c82115a72e492": ("0.17.0", "0.17.1"),
            },
        ),
        "distributed_optimizer_load_dp_zero": Checked(
            signatures=("(self, state_dict, *, update_legacy_format=)",),
            fingerprints={
                "314b8a8e7ace6ff6": ("0.17.0", "0.17.1"),
            },
        ),
        "float16_optimizer_init": Checked(
            signatures=("(self, optimizer, config, grad_scaler, init_state_fn)",),
            fingerprints={
                "be12e08d15f72db9": ("0.17.0", "0.17.1"),
            },
        ),
        "float16_optimizer_copy": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "73dd6a33477c1306": ("0.17.0", "0.17.1"),
            },
        ),
        "float16_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "f993cdc732899676": ("0.17.0", "0.17.1"),
            },
        ),
        "layer_wise_init": Checked(
            signatures=(
                "(self, optimizers, config, pg_collection=, init_state_fn_list=, model_chunks=, async_allgather=)",
            ),
            fingerprints={
                "b31318a08714e401": ("0.17.0", "0.17.1"),
            },
        ),
        "layer_wise_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "5a1dfa949b149edc": ("0.17.0", "0.17.1"),
            },
        ),
        "mixed_precision_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "d0cd10fe87acfc57": ("0.17.0", "0.17.1"),
            },
        ),
        "fp32_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "1bb2e20de73e5490": ("0.17.0", "0.17.1"),
            },
        ),
        "chained_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "746b9ae1ab9dd9a7": ("0.17.0", "0.17.1"),
            },
        ),
    },
)

PAIRS = (Pair("0.17.1", "2.14.0", ("delayed", "tensorwise", "blockwise", "mxfp8")),)
