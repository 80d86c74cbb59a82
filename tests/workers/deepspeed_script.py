"""A script for DeepSpeed, in many configurations: ``python -m tests.workers.deepspeed_script LIBRARY OUT CASE…``

``LIBRARY`` is ``deepspeed``, the installed package, or ``face``, ``frontends.torch.deepspeed``: that import is the line
that differs. The results go to ``OUT.RANK.pt``: of each case the losses, counts, rates and norms of every step, and the
master weights at the end.
"""

import logging
import os
import shutil
import sys
import warnings

import torch

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
library, out = sys.argv[1:3]
if library == "deepspeed":
    import deepspeed

    type(deepspeed.get_accelerator()).is_fp16_supported = lambda _: True  # few processors are fast enough for it
else:
    from frontends.torch import deepspeed  # the line that differs

from tests.support.deepspeed_cases import CASES  # noqa: E402  # after the library, which sets torch up

WIDTH, BATCH = 16, 4
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = torch.nn.LayerNorm(3 * WIDTH)
        self.head = torch.nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.embed(x))))


def batch_of(step, rank, dtype):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=generator).to(dtype)


def parameters_of(model, case):
    if not case.get("groups"):
        return model.parameters()
    named = [*model.named_parameters()]
    return [
        {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1, "lr": 3e-3},
        {"params": [p for n, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]


def client_of(model, case):
    if "client" not in case:
        return None
    kind, options = case["client"]
    make = getattr(torch.optim, kind)
    if case.get("as_function"):
        return lambda params: make(params, **options)
    optimizer = make(parameters_of(model, case), **options)
    for step in range(case.get("before", 0)):
        model(batch_of(50 + step, 0, torch.float32)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def scheduler_of(optimizer, case):
    if "schedule" not in case:
        return None
    kind, options = case["schedule"]
    make = getattr(torch.optim.lr_scheduler, kind)
    return (lambda given: make(given, **options)) if case.get("as_function") else make(optimizer, **options)


def engine_of(case, dtype):
    torch.manual_seed(7)
    model = Model()
    optimizer = client_of(model, case)
    config = {"train_micro_batch_size_per_gpu": BATCH, "zero_allow_untested_optimizer": True, **case["config"]}
    engine, _, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=None if optimizer is not None and not case.get("as_function") else parameters_of(model, case),
        lr_scheduler=scheduler_of(optimizer, case),
        config=config,
    )
    return engine, scheduler


def run(case, folder):
    dtype = TYPES.get(case.get("dtype"), torch.float32)
    engine, scheduler = engine_of(case, dtype)
    rank, seen = engine.global_rank, []

    def micro_step(step, act):
        loss = engine(batch_of(step, rank, dtype)).float().pow(2).mean()
        if step in case.get("overflow", ()):
            loss = loss * float("inf")
        act(loss)
        return loss.item()

    def note(loss):
        norm = engine.get_global_grad_norm()
        seen.append(
            {
                "loss": loss,
                "steps": (engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.global_samples),
                "lr": list(map(float, engine.get_lr())),
                "last": [] if scheduler is None else list(map(float, scheduler.get_last_lr())),
                "norm": None if norm is None or not case.get("norms", True) else float(norm),
                "scale": float(getattr(engine.optimizer, "cur_scale", 1.0)) if "fp16" in case["config"] else 1.0,
            }
        )

    backward = {
        "plain": lambda loss: loss.backward(),
        "summed": lambda loss: engine.backward(loss, scale_wrt_gas=False),
        "engine": lambda loss: float(engine.backward(loss)),
    }[case.get("backward", "engine")]
    for step in range(case.get("steps", 8)):
        if step == case.get("resume"):
            engine.save_checkpoint(folder, client_state={"step": step})
            engine.destroy()
            engine, scheduler = engine_of(case, dtype)
            path, client = engine.load_checkpoint(folder)
            assert client["step"] == step, (path, client)
        if step == case.get("larger_batch_at"):
            engine.set_train_batch_size(2 * engine.train_batch_size())
        if case.get("no_sync"):
            with engine.no_sync():
                micro_step(100 + step, backward)
        if case.get("boundary_by_hand"):
            engine.set_gradient_accumulation_boundary(step % 2 == 1)
        loss = micro_step(step, backward)
        if not case.get("boundary_by_hand") or step % 2:
            engine.step()
        note(loss)
    masters = {}
    for name, param in engine.module.named_parameters():
        whole = deepspeed.utils.safe_get_full_fp32_param(param)
        masters[name] = (param if whole is None else whole).detach().float().cpu().clone()
    engine.destroy()
    return {"seen": seen, "masters": masters}


def main():
    results = {}
    deepspeed.init_distributed()
    for name in sys.argv[3:] or CASES:
        folder = f"{out}.{name}"
        results[name] = run(CASES[name], folder)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        torch.distributed.barrier()
    torch.save(results, f"{out}.{os.environ.get('RANK', '0')}.pt")


main()
