"""What was checked in megatron-core 0.18. Drafted by scripts/release_line.py."""

from __future__ import annotations

from ._schema import Checked, Pair, Quirks, ReleaseLine

LINE = ReleaseLine(
    name="0.18",
    releases=("0.18.0", "0.18.2"),
    pythons=("3.12", "3.13"),
    torch="2.12.1",
    numpy_2=True,
    native=(
        "As 0.17, but a chain gives every optimizer its part of the state dict, and grouped weights are renamed for "
        "the match."
    ),
    quirks=Quirks(
        reload_accepts_state_dict=True,
        zarr=False,
        state_dict_normalizers=("_normalize_state_dict_for_grouped_params",),
    ),
    targets={
        "dist_load": Checked(
            signatures=(
                (
                    "(sharded_state_dict, checkpoint_dir, sharded_strategy=, common_strategy=, "
                    "validate_access_integrity=, strict=, verify_integrity=)"
                ),
            ),
            fingerprints={
                "0cd0fb909d1279e7": ("0.18.0", "0.18.2"),
            },
        ),
        "torch_dist_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir, async_strategy=)",),
            fingerprints={
                "44fea454add5ce67": ("0.18.0", "0.18.2"),
            },
        ),
        "fully_parallel_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir, async_strategy=)",),
            fingerprints={
                "496d81183b21a955": ("0.18.0", "0.18.2"),
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
                "53ec56b328b81236": ("0.18.0", "0.18.2"),
            },
        ),
        "distributed_optimizer_copy": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "d00b48a39824556e": ("0.18.0", "0.18.2"),
            },
        ),
        "distributed_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "ff8aeb74b8965c37": ("0.18.0", "0.18.2"),
            },
        ),
        "distributed_optimizer_load_dp_zero": Checked(
            signatures=("(self, state_dict, *, update_legacy_format=)",),
            fingerprints={
                "314b8a8e7ace6ff6": ("0.18.0", "0.18.2"),
            },
        ),
        "float16_optimizer_init": Checked(
            signatures=("(self, optimizer, config, grad_scaler, init_state_fn)",),
            fingerprints={
                "be12e08d15f72db9": ("0.18.0", "0.18.2"),
            },
        ),
        "float16_optimizer_copy": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "73dd6a33477c1306": ("0.18.0", "0.18.2"),
            },
        ),
        "float16_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "f993cdc732899676": ("0.18.0", "0.18.2"),
            },
        ),
        "layer_wise_init": Checked(
            signatures=("(self, optimizers, config, pg_collection=, init_state_fn_list=, model_chunks=)",),
            fingerprints={
                "163cb0e011722e20": ("0.18.0", "0.18.2"),
            },
        ),
        "layer_wise_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "5a1dfa949b149edc": ("0.18.0", "0.18.2"),
            },
        ),
        "mixed_precision_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "d0cd10fe87acfc57": ("0.18.0", "0.18.2"),
            },
        ),
        "fp32_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "1bb2e20de73e5490": ("0.18.0", "0.18.2"),
            },
        ),
        "chained_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "746b9ae1ab9dd9a7": ("0.18.0", "0.18.2"),
            },
        ),
    },
)

PAIRS = (Pair("0.18.2", "2.17.1", ("delayed", "tensorwise", "blockwise", "mxfp8")),)
