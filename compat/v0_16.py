"""What was checked in megatron-core 0.16. Drafted by scripts/release_line.py."""

from __future__ import annotations

from ._schema import Checked, Pair, Quirks, ReleaseLine

LINE = ReleaseLine(
    name="0.16",
    releases=("0.16.0", "0.16.1"),
    pythons=("3.10", "3.11", "3.12", "3.13"),
    torch="2.10.0",
    numpy_2=True,
    native="As 0.15; the zarr format is gone.",
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
            ),
            fingerprints={
                "36b3d259f88b1c97": ("0.16.0", "0.16.1"),
            },
        ),
        "torch_dist_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "c098161b2a806cd3": ("0.16.0", "0.16.1"),
            },
        ),
        "fully_parallel_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "4c5b29fdd5c59e1a": ("0.16.0", "0.16.1"),
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
                "35cacd2509629df8": ("0.16.0", "0.16.1"),
            },
        ),
        "distributed_optimizer_copy": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "0ddec296cedea78f": ("0.16.0", "0.16.1"),
            },
        ),
        "distributed_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "862c82115a72e492": ("0.16.0", "0.16.1"),
            },
        ),
        "distributed_optimizer_load_dp_zero": Checked(
            signatures=("(self, state_dict, *, update_legacy_format=)",),
            fingerprints={
                "314b8a8e7ace6ff6": ("0.16.0", "0.16.1"),
            },
        ),
        "float16_optimizer_init": Checked(
            signatures=("(self, optimizer, config, grad_scaler, init_state_fn)",),
            fingerprints={
                "be12e08d15f72db9": ("0.16.0", "0.16.1"),
            },
        ),
        "float16_optimizer_copy": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "73dd6a33477c1306": ("0.16.0", "0.16.1"),
            },
        ),
        "float16_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "f993cdc732899676": ("0.16.0", "0.16.1"),
            },
        ),
        "layer_wise_init": Checked(
            signatures=("(self, optimizers, config, pg_collection=, init_state_fn_list=)",),
            fingerprints={
                "4c535d6f2f26776f": ("0.16.0", "0.16.1"),
            },
        ),
        "layer_wise_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "5a1dfa949b149edc": ("0.16.0", "0.16.1"),
            },
        ),
        "mixed_precision_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "d0cd10fe87acfc57": ("0.16.0", "0.16.1"),
            },
        ),
        "fp32_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "1bb2e20de73e5490": ("0.16.0", "0.16.1"),
            },
        ),
        "chained_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "746b9ae1ab9dd9a7": ("0.16.0", "0.16.1"),
            },
        ),
    },
)

PAIRS = (
    Pair("0.16.1", "2.10.0", ("delayed", "tensorwise", "blockwise", "mxfp8")),
    Pair("0.16.1", "2.14.0", ("delayed", "tensorwise", "blockwise", "mxfp8")),
)
