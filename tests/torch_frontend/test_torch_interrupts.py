"""Torch's modes are switched where no interrupt cuts; ``tests/laws/test_interrupts.py`` interrupts each call."""

import re
from pathlib import Path

import frontends.torch


def test_each_context_of_torchs_that_switches_grad_mode_is_inside_one_that_no_interrupt_cuts():
    sources = [*Path(frontends.torch.__path__[0]).rglob("*.py")]
    switched = [
        f"{path.name}: {line.strip()}"
        for path in sources
        for line in path.read_text().splitlines()
        if re.match(r"\s*with .*(no_grad|enable_grad|set_grad_enabled)\(", line)
    ]
    assert len(switched) > 10
    assert [line for line in switched if "grad_mode_kept(), " not in line] == []
