"""Ctrl-C at any line of an engine's backward and step: the step has not been, or it has been whole."""

import pytest
import torch

from frontends.torch import gathered_parameters, intake, wrap
from frontends.torch.ranks import device_ranks
from tests.support.interrupts import FewerLines, interrupt_at, numbers_of
from tests.support.late_stores import PARAMETERS_ON_DISK
from tests.support.slow_torch_device import SlowTorchDevice

ON_DISK = {**PARAMETERS_ON_DISK, "param_dtype": "bfloat16", "reduce_bucket_size": 64}
CASES = {
    "host, in place": (None, {}),
    "host, clipped": (None, {"param_dtype": "bfloat16", "gradient_clipping": 0.05}),
    "late": (5e-5, {"param_dtype": "bfloat16", "reduce_bucket_size": 64}),
    "host, parameters on disk": (None, ON_DISK),
    "late, parameters on disk": (5e-5, {**ON_DISK, "nvme_host_bytes": 2000}),
}


def step(engine, seed):
    generator = torch.Generator().manual_seed(seed)
    engine.backward(engine(torch.randn(4, 8, generator=generator)).float().pow(2).mean())
    engine.step()


def begun(options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4, bias=False))
    engine = wrap(model, lr=lambda updates: 0.1 / (1 + updates), num_threads=1, **options)
    step(engine, 1)
    return engine


def end(engine):
    """Three more steps, and all that there is then."""
    for seed in (3, 4, 5):
        step(engine, seed)
    engine.flush()
    with gathered_parameters(engine.module.parameters()):
        tensors = [p.detach().clone() for p in engine.module.parameters()]
    tensors += [state for entry in engine.optimizer.state.values() for state in entry.values()]
    bits = [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    steps = [float(entry["step"]) for entry in engine.optimizer.state.values()]
    updates = engine.optimizer.updates
    engine.close()
    return bits, steps, updates


@pytest.mark.parametrize(
    "of",
    [
        "a third",
        pytest.param("first pass", marks=pytest.mark.slow),
        pytest.param("each pass", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_line_leaves_the_state_before_the_step_or_after_it(case, of, monkeypatch):
    """``of``: at each line's first pass, at each of its passes, or in each case at another third of the lines."""
    delay, options = CASES[case]
    if delay is not None:
        slow = SlowTorchDevice(delay)
        monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)
    whole = begun(options)
    step(whole, 2)
    allowed = [end(begun(options)), end(whole)]
    assert [outcome[1:] for outcome in allowed] == [([4.0] * 3, 4), ([5.0] * 3, 5)]
    counted = begun(options)
    numbers = numbers_of(lambda: step(counted, 2), "each pass" if of == "each pass" else "first pass")
    counted.close()
    if of == "a third":
        numbers = numbers[[*CASES].index(case) :: len(CASES)]
    seen = set()

    def interrupted(number):
        engine = begun(options)
        try:
            interrupt_at(number, lambda: step(engine, 2))
        except FewerLines:
            engine.close()
            return False
        assert not any(backward.runs.locked() for backward in intake._STARTED), f"line {number}"
        engine.optimizer.zero_grad()
        outcome = end(engine)
        assert outcome in allowed, f"line {number}"
        seen.add(allowed.index(outcome))
        return True

    for number in numbers:
        interrupted(number)
    last = numbers[-1]
    while seen != {0, 1} and interrupted(last + 1):  # waits for a disk take more lines than were counted, or fewer
        last += 1
    while seen != {0, 1} and last > 0:
        interrupted(last := last - 1)
    assert seen == {0, 1}
