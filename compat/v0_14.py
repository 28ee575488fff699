"""What was checked in megatron-core 0.14. Drafted by scripts/release_line.py."""

from __future__ import annotations

from ._schema import Checked, Pair, Quirks, ReleaseLine

LINE = ReleaseLine(
    name="0.14",
    releases=("0.14.0",),
    pythons=("3.10", "3.11", "3.12", "3.13"),
    torch="2.8.0",
    numpy_2=False,
    native=(
        "An opt-in flag hands the state dict to reload_model_params, for the distributed optimizer only; it finds "
        "names by substring, misses experts in a chain, and gets bf16 from an fp32 torch_dist checkpoint."
    ),
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
                "36b3d259f88b1c97": ("0.14.0",),
            },
        ),
        "torch_dist_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "427b66f21820c0c1": ("0.14.0",),
            },
        ),
        "fully_parallel_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "4c5b29fdd5c59e1a": ("0.14.0",),
            },
        ),
        "tensorstore_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "97a3da2639367d24": ("0.14.0",),
            },
        ),
        "two_stage_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "debc3145e4743e71": ("0.14.0",),
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
                "55316acc682ce247": ("0.14.0",),
            },
        ),
        "distributed_optimizer_copy": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "0ddec296cedea78f": ("0.14.0",),
            },
        ),
        "distributed_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "8fb4a1611ccbbcb2": ("0.14.0",),
            },
        ),
        "distributed_optimizer_load_dp_zero": Checked(
            signatures=("(self, state_dict, *, update_legacy_format=)",),
            fingerprints={
                "314b8a8e7ace6ff6": ("0.14.0",),
            },
        ),
        "float16_optimizer_init": Checked(
            signatures=("(self, optimizer, config, grad_scaler, init_state_fn)",),
            fingerprints={
                "be12e08d15f72db9": ("0.14.0",),
            },
        ),
        "float16_optimizer_copy": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "73dd6a33477c1306": ("0.14.0",),
            },
        ),
        "float16_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "f993cdc732899676": ("0.14.0",),
            },
        ),
        "mixed_precision_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "d0cd10fe87acfc57": ("0.14.0",),
            },
        ),
        "fp32_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "1bb2e20de73e5490": ("0.14.0",),
            },
        ),
        "chained_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "746b9ae1ab9dd9a7": ("0.14.0",),
            },
        ),
    },
)

PAIRS = (Pair("0.14.0", "2.8.0", ("delayed", "tensorwise", "blockwise", "mxfp8"), fast=True),)
