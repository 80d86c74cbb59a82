"""A user of the core, for type checkers alone.

`make lint` checks it beside the source, tests/packaging/wheel_check.py beside an installed wheel. An `ignore` that
nothing needs is an error, so those lines show that a mistake is seen.
"""

from typing import assert_type

from offload_core import KernelInfo, OffloadConfig, kernel_info, set_instruction_set


def use() -> None:
    config = OffloadConfig(lr=3e-4, stage=3, gradient_clipping=1.0)
    assert_type(config.stage, int)
    assert_type(config.gradient_clipping, float | None)
    OffloadConfig(stages=3)  # type: ignore[call-arg]

    assert_type(kernel_info(), KernelInfo)
    assert_type(kernel_info().supported, tuple[str, ...])
    set_instruction_set(2)  # type: ignore[arg-type]
