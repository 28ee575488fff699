"""What was checked in megatron-core 0.11. Drafted by scripts/release_line.py."""

from __future__ import annotations

from ._schema import Checked, Pair, Quirks, ReleaseLine

LINE = ReleaseLine(
    name="0.11",
    releases=("0.11.0",),
    pythons=("3.10", "3.11"),
    torch="2.6.0",
    numpy_2=False,
    native="As 0.10; with the precision-aware optimizer a reload does nothing.",
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
                "ccb4fb167dcac244": ("0.11.0",),
            },
        ),
        "torch_dist_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "76d3162af65da328": ("0.11.0",),
            },
        ),
        "fully_parallel_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "d383ac3384b785b6": ("0.11.0",),
            },
        ),
        "tensorstore_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "40a27457df7a0209": ("0.11.0",),
            },
        ),
        "two_stage_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "debc3145e4743e71": ("0.11.0",),
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
                "48886f61e8e5018d": ("0.11.0",),
            },
        ),
        "distributed_optimizer_copy": Checked(
            signatures=("(self)",),
            fingerprints={
                "8401a8c94be90b57": ("0.11.0",),
            },
        ),
        "distributed_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "d3e1d468872ac6a5": ("0.11.0",),
            },
        ),
        "distributed_optimizer_load_dp_zero": Checked(
            signatures=("(self, state_dict, *, update_legacy_format=)",),
            fingerprints={
                "302fbce520674883": ("0.11.0",),
            },
        ),
        "float16_optimizer_init": Checked(
            signatures=("(self, optimizer, config, grad_scaler, init_state_fn)",),
            fingerprints={
                "be12e08d15f72db9": ("0.11.0",),
            },
        ),
        "float16_optimizer_copy": Checked(
            signatures=("(self)",),
            fingerprints={
                "a2a8575e7a0125bf": ("0.11.0",),
            },
        ),
        "float16_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "3a925c1381c90ea3": ("0.11.0",),
            },
        ),
        "mixed_precision_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "415749ec6afaae3a": ("0.11.0",),
            },
        ),
        "fp32_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "e756a726394143dd": ("0.11.0",),
            },
        ),
        "chained_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "78fc38512c689d38": ("0.11.0",),
            },
        ),
    },
)

PAIRS = (Pair("0.11.0", "2.1.0", ("delayed",), steps=False),)
