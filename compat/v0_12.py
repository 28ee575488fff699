"""What was checked in megatron-core 0.12. Drafted by scripts/release_line.py."""

from __future__ import annotations

from ._schema import Checked, Pair, Quirks, ReleaseLine

LINE = ReleaseLine(
    name="0.12",
    releases=("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
    pythons=("3.10", "3.11"),
    torch="2.7.0",
    numpy_2=False,
    native=(
        "As 0.11; fp8 parameters keep their random initial value in high precision, and a later built optimizer takes "
        "its masters from it."
    ),
    quirks=Quirks(
        reload_accepts_state_dict=False,
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
                "ccb4fb167dcac244": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "torch_dist_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "ed8d411a470ab0be": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "fully_parallel_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "d383ac3384b785b6": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "tensorstore_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "40a27457df7a0209": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "two_stage_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "debc3145e4743e71": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
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
                "c9c580e04f7bb0c7": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "distributed_optimizer_copy": Checked(
            signatures=("(self)",),
            fingerprints={
                "3d3865217a5fab6b": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "distributed_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "fa835897e9e76e3a": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "distributed_optimizer_load_dp_zero": Checked(
            signatures=("(self, state_dict, *, update_legacy_format=)",),
            fingerprints={
                "a4d43d027f213b2b": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "float16_optimizer_init": Checked(
            signatures=("(self, optimizer, config, grad_scaler, init_state_fn)",),
            fingerprints={
                "be12e08d15f72db9": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "float16_optimizer_copy": Checked(
            signatures=("(self)",),
            fingerprints={
                "a2a8575e7a0125bf": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "float16_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "3a925c1381c90ea3": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "mixed_precision_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "415749ec6afaae3a": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "fp32_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "e756a726394143dd": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
        "chained_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "78fc38512c689d38": ("0.12.0", "0.12.1", "0.12.2", "0.12.3"),
            },
        ),
    },
)

PAIRS = (
    Pair("0.12.3", "1.13.0", ("delayed",), steps=False),
    Pair("0.12.3", "2.2.0", ("delayed", "tensorwise")),
    Pair("0.12.3", "2.5.0", ("delayed", "tensorwise")),
)
