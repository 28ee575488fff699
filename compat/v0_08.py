"""What was checked in megatron-core 0.8. Drafted by scripts/release_line.py."""

from __future__ import annotations

from ._schema import Checked, Quirks, ReleaseLine

LINE = ReleaseLine(
    name="0.8",
    releases=("0.8.0",),
    pythons=("3.10", "3.11"),
    torch="2.4.0",
    numpy_2=False,
    native="Masters are built and reloaded from the parameters, which are 16-bit whatever is on disk.",
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
                "845efd0935eabe38": ("0.8.0",),
            },
        ),
        "torch_dist_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "4f583ae6ee6fd1f3": ("0.8.0",),
            },
        ),
        "fully_parallel_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "47d2621628e74742": ("0.8.0",),
            },
        ),
        "tensorstore_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "40a27457df7a0209": ("0.8.0",),
            },
        ),
        "two_stage_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "69c037f5b097ab38": ("0.8.0",),
            },
        ),
        "distributed_optimizer_init": Checked(
            signatures=(
                (
                    "(self, optimizer, config, grad_scaler, init_state_fn, per_model_buffers, data_parallel_group, "
                    "data_parallel_group_gloo, data_parallel_group_idx)"
                ),
            ),
            fingerprints={
                "aefa528dfb73a683": ("0.8.0",),
            },
        ),
        "distributed_optimizer_copy": Checked(
            signatures=("(self)",),
            fingerprints={
                "4b4c62ce8d49991d": ("0.8.0",),
            },
        ),
        "distributed_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "b9b29b8df6953f0a": ("0.8.0",),
            },
        ),
        "distributed_optimizer_load_dp_zero": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "3c9768424f5231ec": ("0.8.0",),
            },
        ),
        "float16_optimizer_init": Checked(
            signatures=("(self, optimizer, config, grad_scaler, init_state_fn)",),
            fingerprints={
                "e704401b7f4dd5d1": ("0.8.0",),
            },
        ),
        "float16_optimizer_copy": Checked(
            signatures=("(self)",),
            fingerprints={
                "a2a8575e7a0125bf": ("0.8.0",),
            },
        ),
        "float16_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "a2cf69a446cc745e": ("0.8.0",),
            },
        ),
        "mixed_precision_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "e5626ad21f59bdd2": ("0.8.0",),
            },
        ),
        "fp32_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "e756a726394143dd": ("0.8.0",),
            },
        ),
        "chained_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "78fc38512c689d38": ("0.8.0",),
            },
        ),
    },
    also_needs=("setuptools<70",),
)
