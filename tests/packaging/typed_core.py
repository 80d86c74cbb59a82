"""A user of the core, for type checkers alone.

`make lint` checks it beside the source, tests/packaging/wheel_check.py beside an installed wheel. An `ignore` that
nothing needs is an error, so those lines show that a mistake is seen.
"""

from typing import Unpack, assert_type

from offload_core import KernelInfo, OffloadConfig, OffloadSettings, kernel_info, set_instruction_set


def resolved(**settings: Unpack[OffloadSettings]) -> OffloadConfig:
    return OffloadConfig.resolve({"stage": 1}, **settings)


def use() -> None:
    config = OffloadConfig(lr=3e-4, stage=3, gradient_clipping=1.0)
    assert_type(config.stage, int)
    assert_type(config.gradient_clipping, float | None)
    OffloadConfig(stages=3)  # type: ignore[call-arg]
    resolved(gradient_acumulation=2)  # type: ignore[call-arg]
    resolved(stage="2")  # type: ignore[arg-type]
    resolved(lr=lambda count: 1e-3, betas=(0.9, 0.95), param_dtype="bfloat16")

    assert_type(kernel_info(), KernelInfo)
    assert_type(kernel_info().supported, tuple[str, ...])
    set_instruction_set(2)  # type: ignore[arg-type]
