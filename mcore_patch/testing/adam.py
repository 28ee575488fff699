"""apex's ``FusedAdam``, in torch: which state it keeps where, and the AdamW step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW that counts its steps per parameter group, as apex and transformer-engine do, not per parameter.

    megatron-core saves and restores every entry of a parameter's state as a tensor of the parameter's size, so torch's
    ``step`` scalar stops most kinds of its optimizer checkpoints (KeyError 'step' and assertions, 0.10 to 0.19).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                deviation = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(mean / deviation, alpha=group["lr"])
