"""A user of the torch front end, for type checkers alone; see typed_core.py."""

from pathlib import Path
from typing import assert_type

import torch

from frontends.torch import (
    Engine,
    OffloadConfig,
    OffloadedAdamW,
    OffloadedOptimizer,
    StepReport,
    gathered_parameters,
    init,
    wrap,
)


def train(model: torch.nn.Module, batches: list[torch.Tensor], folder: Path) -> None:
    engine = wrap(model, OffloadConfig(stage=2), lr=3e-4)
    assert_type(engine, Engine)
    wrap("model")  # type: ignore[arg-type]
    wrap(model, gradient_acumulation=2)  # type: ignore[call-arg]
    wrap(model, stage="2")  # type: ignore[arg-type]
    wrap(model, param_dtype=torch.bfloat16, betas=[0.9, 0.95], leaf_modules=["mlp"], lr=torch.tensor(1e-3))
    with init(stagee=3):  # type: ignore[call-arg]
        pass

    for batch in batches:
        loss = engine(batch).square().sum()
        engine.backward(loss)
        report = engine.step()
        assert_type(report, StepReport)
        assert_type(report.updated, bool)
        assert_type(report.skipped, str | None)
        assert_type(report.grad_norm, float | None)
        print(report.norm)  # type: ignore[attr-defined]
    with engine.no_sync(), engine.trace(folder / "step.json"):
        engine.flush()
    engine.step(None)  # type: ignore[call-arg]

    assert_type(engine.optimizer, OffloadedOptimizer)
    assert_type(engine.module, torch.nn.Module)
    assert_type(engine.offload_config, OffloadConfig)
    assert_type(engine.sent_bytes, int)
    assert_type(engine.memory_report().host_bytes, int)
    engine.save_checkpoint(folder, wait=False)
    engine.save_checkpoint(3)  # type: ignore[arg-type]


def alone(model: torch.nn.Module) -> None:
    OffloadedAdamW(model.parameters(), lr=1e-3, weigth_decay=0.1)  # type: ignore[call-arg]
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    optimizer.zero_grad()
    optimizer.step()
    scheduler.step()
    with gathered_parameters(model.parameters()):
        pass
