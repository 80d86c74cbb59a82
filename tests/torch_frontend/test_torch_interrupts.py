"""Ctrl-C at any line of an engine's backward and step: the step has not been, or it has been whole."""

import pytest
import torch

from frontends.torch import wrap
from frontends.torch.ranks import device_ranks
from tests.support.interrupts import Interrupt, first_passes, interrupt_at, lines_of
from tests.support.slow_torch_device import SlowTorchDevice

CASES = {
    "host, in place": (None, {}),
    "host, clipped": (None, {"param_dtype": "bfloat16", "gradient_clipping": 0.05}),
    "late": (5e-5, {"param_dtype": "bfloat16", "reduce_bucket_size": 64}),
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
    tensors = [*engine.module.parameters()]
    tensors += [state for entry in engine.optimizer.state.values() for state in entry.values()]
    bits = [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    steps = [float(entry["step"]) for entry in engine.optimizer.state.values()]
    updates = engine.optimizer.updates
    engine.close()
    return bits, steps, updates


@pytest.mark.parametrize(
    "each", ["line", pytest.param("pass of a line", marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_line_leaves_the_state_before_the_step_or_after_it(case, each, monkeypatch):
    delay, options = CASES[case]
    if delay is not None:
        slow = SlowTorchDevice(delay)
        monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)
    whole = begun(options)
    step(whole, 2)
    allowed = [end(begun(options)), end(whole)]
    assert [outcome[1:] for outcome in allowed] == [([4.0] * 3, 4), ([5.0] * 3, 5)]
    counted = begun(options)
    if each == "line":
        numbers = sorted(first_passes(lambda: step(counted, 2)).values())
    else:
        numbers = range(lines_of(lambda: step(counted, 2)))
    counted.close()
    n_lines = numbers[-1] + 1
    seen = set()

    def interrupted_at(number):
        engine = begun(options)
        try:
            interrupt_at(number, lambda: step(engine, 2))
        except AssertionError:  # how many lines it takes depends on the threads a little
            assert number > 0.8 * n_lines
            engine.close()
            return
        engine.optimizer.zero_grad()
        outcome = end(engine)
        assert outcome in allowed, f"line {number} of {n_lines}"
        seen.add(allowed.index(outcome))

    for number in numbers:
        interrupted_at(number)
    last = n_lines
    while 1 not in seen and last > 0.8 * n_lines:  # it took fewer lines than were counted
        interrupted_at(last := last - 1)
    assert seen == {0, 1}
    assert issubclass(Interrupt, KeyboardInterrupt)
