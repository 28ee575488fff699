"""What was checked in megatron-core 0.7. Drafted by scripts/release_line.py."""

from __future__ import annotations

from ._schema import Checked, Quirks, ReleaseLine

LINE = ReleaseLine(
    name="0.7",
    releases=("0.7.0",),
    pythons=("3.10", "3.11"),
    torch="2.3.1",
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
                "(sharded_state_dict, checkpoint_dir, sharded_strategy=, common_strategy=, validate_access_integrity=)",
            ),
            fingerprints={
                "7af13de33ad4feaa": ("0.7.0",),
            },
        ),
        "torch_dist_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "5851997afd44508c": ("0.7.0",),
            },
        ),
        "fully_parallel_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "1fa32f7db3e026d7": ("0.7.0",),
            },
        ),
        "tensorstore_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "40a27457df7a0209": ("0.7.0",),
            },
        ),
        "two_stage_load": Checked(
            signatures=("(self, sharded_state_dict, checkpoint_dir)",),
            fingerprints={
                "69c037f5b097ab38": ("0.7.0",),
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
                "c22bb29ba41eb04b": ("0.7.0",),
            },
        ),
        "distributed_optimizer_copy": Checked(
            signatures=("(self)",),
            fingerprints={
                "4b4c62ce8d49991d": ("0.7.0",),
            },
        ),
        "distributed_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "10bd028d16849beb": ("0.7.0",),
            },
        ),
        "distributed_optimizer_load_dp_zero": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "6b0225d00f87336d": ("0.7.0",),
            },
        ),
        "float16_optimizer_init": Checked(
            signatures=("(self, optimizer, config, grad_scaler, init_state_fn)",),
            fingerprints={
                "cf69bbdfbeb9fc45": ("0.7.0",),
            },
        ),
        "float16_optimizer_copy": Checked(
            signatures=("(self)",),
            fingerprints={
                "a2a8575e7a0125bf": ("0.7.0",),
            },
        ),
        "float16_optimizer_load": Checked(
            signatures=("(self, state_dict)",),
            fingerprints={
                "c285c9474ef616ef": ("0.7.0",),
            },
        ),
        "mixed_precision_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "e5626ad21f59bdd2": ("0.7.0",),
            },
        ),
        "fp32_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "e756a726394143dd": ("0.7.0",),
            },
        ),
        "chained_reload": Checked(
            signatures=("(self)",),
            fingerprints={
                "78fc38512c689d38": ("0.7.0",),
            },
        ),
    },
    also_needs=("setuptools<70",),
)
