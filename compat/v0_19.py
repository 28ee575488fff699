"""What was checked in megatron-core 0.19. Drafted by scripts/release_line.py."""

from __future__ import annotations

from ._schema import Checked, Pair, Quirks, ReleaseLine

LINE = ReleaseLine(
    name="0.19",
    releases=("0.19.0", "0.19.2"),
    pythons=("3.12", "3.13"),
    torch="2.15.0",
    numpy_2=True,
    native=(
        "As 0.18, but by default a checkpoint is quantized again while it loads, so the opt-in flag builds masters "
        "from quantized values."
    ),
    quirks=Quirks(
        reload_accepts_state_dict=True,
        zarr=False,
        state_dict_normalizers=("_normalize_state_dict_for_grouped_params", "_synthesize_state_dict_params_for_model"),
    ),
    targets={
        "dist_load": Checked(
            signatures=(
                (
                    "(sharded_state_dict, checkpoint_dir, sharded_strategy=, validate_access_integrity=, strict=, "
                    "verify_integrity=, process_group=)"
                ),
            ),
            fingerprints={
                "982f100b500f660c": ("0.19.0", "0.19.2"),
            },
        ),
        "torch_dist_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir, async_strategy=)",),
            fingerprints={
                "449a77bafdb4bac8": ("0.19.0", "0.19.2"),
            },
        ),
        "fully_parallel_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir, async_strategy=)",),
            fingerprints={
                "496d81183b21a955": ("0.19.0", "0.19.2"),
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
                "c8a0d3506ddfe701": ("0.19.0", "0.19.2"),
            },
        ),
        "distributed_optimizer_copy": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "d00b48a39824556e": ("0.19.0", "0.19.2"),
            },
        ),
        "distributed_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "c1559bf9ad2914ab": ("0.19.0", "0.19.2"),
            },
        ),
        "distributed_optimizer_load_dp_zero": Checked(
            signatures=("(self, state_dict, *, update_legacy_format=)",),
            fingerprints={
                "7ab2e00a42eefdaf": ("0.19.0", "0.19.2"),
            },
        ),
        "float16_optimizer_init": Checked(
            signatures=("(self, optimizer, config, grad_scaler, init_state_fn)",),
            fingerprints={
                "32a4d2f0ee7d8cde": ("0.19.0", "0.19.2"),
            },
        ),
        "float16_optimizer_copy": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "73dd6a33477c1306": ("0.19.0", "0.19.2"),
            },
        ),
        "float16_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "f993cdc732899676": ("0.19.0", "0.19.2"),
            },
        ),
        "layer_wise_init": Checked(
            signatures=("(self, optimizers, config, pg_collection=, init_state_fn_list=, model_chunks=)",),
            fingerprints={
                "30dfd9124da0c8f1": ("0.19.0", "0.19.2"),
            },
        ),
        "layer_wise_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "5a1dfa949b149edc": ("0.19.0", "0.19.2"),
            },
        ),
        "mixed_precision_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "d0cd10fe87acfc57": ("0.19.0", "0.19.2"),
            },
        ),
        "fp32_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "1bb2e20de73e5490": ("0.19.0", "0.19.2"),
            },
        ),
        "chained_reload": Checked(
            signatures=("(self, state_dict=)",),
            fingerprints={
                "746b9ae1ab9dd9a7": ("0.19.0", "0.19.2"),
            },
        ),
    },
)

PAIRS = (
    Pair("0.19.2", "2.17.1", ("delayed", "tensorwise", "blockwise", "mxfp8")),
    Pair("0.19.2", "2.20.2", ("delayed", "tensorwise", "blockwise", "mxfp8"), fast=True),
)
