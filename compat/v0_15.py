"""What was checked in megatron-core 0.15. Drafted by scripts/release_line.py."""

from __future__ import annotations

from ._schema import Checked, Pair, Quirks, ReleaseLine

LINE = ReleaseLine(
    name="0.15",
    releases=("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
    pythons=("3.10", "3.11", "3.12", "3.13"),
    torch="2.9.1",
    numpy_2=False,
    native="As 0.14.",
    quirks=Quirks(
        reload_accepts_state_dict=True,
        zarr=True,
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
                "36b3d259f88b1c97": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "torch_dist_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "7814be7ea1847f53": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "fully_parallel_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "4c5b29fdd5c59e1a": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "tensorstore_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "97a3da2639367d24": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "two_stage_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "debc3145e4743e71": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
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
                "35cacd2509629df8": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "distributed_optimizer_copy": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "0ddec296cedea78f": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "distributed_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "731d4aec794d2c8b": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "distributed_optimizer_load_dp_zero": Checked(
            signatures=("(self, state_dict, *, update_legacy_format=)",),
            fingerprints={
                "314b8a8e7ace6ff6": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "float16_optimizer_init": Checked(
            signatures=("(self, optimizer, config, grad_scaler, init_state_fn)",),
            fingerprints={
                "be12e08d15f72db9": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "float16_optimizer_copy": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "73dd6a33477c1306": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "float16_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "f993cdc732899676": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "mixed_precision_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "d0cd10fe87acfc57": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "fp32_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "1bb2e20de73e5490": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
        "chained_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "746b9ae1ab9dd9a7": ("0.15.0", "0.15.1", "0.15.2", "0.15.3"),
            },
        ),
    },
)

PAIRS = (Pair("0.15.3", "2.8.0", ("delayed", "tensorwise", "blockwise", "mxfp8")),)
