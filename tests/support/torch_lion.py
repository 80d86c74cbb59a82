"""Lion in torch's operations, each of which rounds once, in the order of algorithm 2 of arXiv:2302.06675."""

from collections.abc import Iterable

import torch


class Lion(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if (grad := param.grad) is None:
                    continue
                state = self.state[param]
                momentum = state["exp_avg"] if state else torch.zeros_like(param)
                update = torch.sign(momentum * beta1 + grad * (1 - beta1))
                update = update + param * group["weight_decay"]
                param.sub_(update * group["lr"])
                state["exp_avg"] = momentum * beta2 + grad * (1 - beta2)
