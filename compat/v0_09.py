"""What was checked in megatron-core 0.9. Drafted by scripts/release_line.py."""

from __future__ import annotations

from ._schema import Checked, Quirks, ReleaseLine

LINE = ReleaseLine(
    name="0.9",
    releases=("0.9.0",),
    pythons=("3.10", "3.11"),
    torch="2.5.1",
    numpy_2=False,
    native=(
        "Masters are built and reloaded from the parameters, which for quantized parameters means from values that "
        "were quantized, or a stale initial value."
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
                "2b60f04a6b8984c0": ("0.9.0",),
            },
        ),
        "torch_dist_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "e1670b7f65833603": ("0.9.0",),
            },
        ),
        "fully_parallel_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "23c4375288892efa": ("0.9.0",),
            },
        ),
        "tensorstore_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "40a27457df7a0209": ("0.9.0",),
            },
        ),
        "two_stage_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "69c037f5b097ab38": ("0.9.0",),
            },
        ),
        "distributed_optimizer_init": Checked(
            signatures=(
                (
                    "(self, optimizer, config, grad_scaler, init_state_fn, model_chunks, per_model_buffers, "
                    "data_parallel_group, data_parallel_group_gloo, data_parallel_group_idx)"
                ),
            ),
            fingerprints={
                "d68fa434b2b0cfe7": ("0.9.0",),
            },
        ),
        "distributed_optimizer_copy": Checked(
            signatures=("(self)",),
            fingerprints={
                "4b4c62ce8d49991d": ("0.9.0",),
            },
        ),
        "distributed_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "a1e2dacdcccf62d9": ("0.9.0",),
            },
        ),
        "distributed_optimizer_load_dp_zero": Checked(
            signatures=("(self, state_dict, *, update_legacy_format=)",),
            fingerprints={
                "cb4ddf6f3903fb40": ("0.9.0",),
            },
        ),
        "float16_optimizer_init": Checked(
            signatures=("(self, optimizer, config, grad_scaler, init_state_fn)",),
            fingerprints={
                "52c385959370e316": ("0.9.0",),
            },
        ),
        "float16_optimizer_copy": Checked(
            signatures=("(self)",),
            fingerprints={
                "a2a8575e7a0125bf": ("0.9.0",),
            },
        ),
        "float16_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "a2cf69a446cc745e": ("0.9.0",),
            },
        ),
        "mixed_precision_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "e5626ad21f59bdd2": ("0.9.0",),
            },
        ),
        "fp32_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "e756a726394143dd": ("0.9.0",),
            },
        ),
        "chained_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "78fc38512c689d38": ("0.9.0",),
            },
        ),
    },
)
