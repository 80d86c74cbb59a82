"""Ctrl-C at any line of an engine's backward and step: the step has not been, or it has been whole."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import frontends.torch
from frontends.torch import export_deepspeed, gathered_parameters, wrap
from frontends.torch.ranks import device_ranks
from frontends.torch.training import grad_hooks
from tests.support import modes
from tests.support.interrupts import FewerLines, first_passes, interrupt_at, numbers_of
from tests.support.late_stores import PARAMETERS_ON_DISK
from tests.support.slow_torch_device import SlowTorchDevice
from tests.support.ways import STAGE_3

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


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    "of",
    [
        "some",
        pytest.param("first pass", marks=pytest.mark.slow),
        pytest.param("each pass", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_line_leaves_the_state_before_the_step_or_after_it(case, of, monkeypatch):
    """``of``: at each line's first pass, at each of its passes, or in each case at some lines."""
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
    if of == "some":
        numbers = numbers[[*CASES].index(case) :: 4 * len(CASES)]
    seen = set()

    def interrupted(number):
        engine = begun(options)
        try:
            interrupt_at(number, lambda: step(engine, 2))
        except FewerLines:
            engine.close()
            return False
        assert not any(backward.runs.locked() for backward in grad_hooks._STARTED), f"line {number}"
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


# --- every call --------------------------------------------------------------------------------------------

CALLS_IN = {
    **CASES,
    "host, delayed": (None, {"param_dtype": "bfloat16", "schedule": "delayed", "delay_warmup_steps": 1}),
    "host, stage 3": (None, {**STAGE_3, "reduce_bucket_size": 64}),
    "late, serial": (5e-5, {"schedule": "serial", "reduce_bucket_size": 64}),
    "late, sent early": (5e-5, {"update_in_backward": True, "gradient_clipping": 1e3, "reduce_bucket_size": 64}),
    "host, updated in backward": (None, {"update_in_backward": True}),
}


def act_on(call, engine, folder):
    """Make a call of an engine."""
    weights = {name: torch.empty_like(t) for name, t in SHAPES.items()}
    match call:
        case "step":
            step(engine, 2)
        case "backward":
            generator = torch.Generator().manual_seed(2)
            engine.backward(engine(torch.randn(4, 8, generator=generator)).float().pow(2).mean())
        case "named_weights":
            assert len([*engine.named_weights(dtype="float32")]) == 3
        case "named_weights, into":
            engine.named_weights(into=weights)
        case "whole_state_dict":
            engine.whole_state_dict()
        case "torch_state_dict":
            engine.optimizer.torch_state_dict()
        case "load_state_dict":
            engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        case "gathered_parameters":
            with gathered_parameters(engine.module.parameters(), modifier_rank=0):
                engine.module[0].bias.detach().mul_(1.0)
        case "export_safetensors":
            engine.export_safetensors(folder / "exported")
        case "export_deepspeed":
            export_deepspeed(engine, folder / "universal")
        case "save_checkpoint":
            engine.save_checkpoint(folder / "saved")
        case "load_checkpoint":
            engine.load_checkpoint(folder / "given")
        case "trace":
            with engine.trace(folder / "trace.json"):
                engine.flush()
        case _:
            getattr(engine, call)()


SHAPES = {"0.weight": torch.empty(16, 8), "0.bias": torch.empty(16), "1.weight": torch.empty(4, 16)}
CALLS = (
    *("step", "backward", "flush", "named_weights", "named_weights, into", "whole_state_dict", "torch_state_dict"),
    *("load_state_dict", "gathered_parameters", "release", "restore", "close", "export_safetensors", "trace"),
    *("export_deepspeed", "save_checkpoint", "load_checkpoint"),
)
QUICK = {("host, in place", "step"), ("late", "named_weights, into"), ("host, delayed", "restore")}


def after(call, engine, folder):
    """End a call that was interrupted, or was not, as a script does that goes on."""
    match call:
        case "release" | "restore":
            engine.restore()
        case "close":
            engine.close()
            assert not engine.optimizer.is_open
            return wrap(engine.module, lr=0.1, num_threads=1, param_dtype=engine.offload_config.param_dtype)
        case "load_checkpoint":
            engine.load_checkpoint(folder / "given")
    if engine.optimizer.core._pipeline._announced.requested and not engine.offload_config.gradient_clipping:
        engine.step()
    engine.optimizer.zero_grad()
    return engine


def calls():
    for case in CALLS_IN:
        for call in CALLS:
            if call == "step" and (case in CASES or case == "host, updated in backward"):
                continue  # the tests above and below
            if call in ("release", "restore") and case.startswith("late"):
                continue  # there is no such accelerator
            for number in (12, None):
                slow = number is None or (case, call) not in QUICK
                yield pytest.param(case, call, number, marks=[pytest.mark.slow] * slow)


@pytest.mark.draws(1)
@pytest.mark.parametrize(("case", "call", "sampled"), [*calls()])
def test_an_interrupt_at_any_line_of_any_call_leaves_what_was_before_it_or_after_it_and_no_mode(
    case, call, sampled, monkeypatch, tmp_path
):
    """The run goes on as if the call had not been, or had been whole.

    Args:
        sampled: the number of lines, evenly spread; None: all, at their first pass.
    """
    delay, options = CALLS_IN[case]
    if delay is not None:
        slow = SlowTorchDevice(delay)
        monkeypatch.setattr(device_ranks, "memory_of", lambda device: slow)

    def begin():
        engine = begun(options)
        if call == "restore":
            engine.release()
        return engine

    def ended(engine):
        return end(after(call, engine, tmp_path))

    given = begun(options)
    given.save_checkpoint(tmp_path / "given")
    given.close()
    whole = begin()
    act_on(call, whole, tmp_path)
    allowed = [ended(begin()), ended(whole)]
    counted = begin()
    passes = first_passes(lambda: act_on(call, counted, tmp_path), modes.FILES)
    ended(counted)
    numbers = [*passes.values()]
    for number in numbers[:: max(len(numbers) // sampled, 1)] if sampled else numbers:
        engine = begin()
        before = modes.modes()
        try:
            with suppress(FewerLines):
                interrupt_at(number, lambda engine=engine: act_on(call, engine, tmp_path), modes.FILES)
            assert modes.modes() == before, f"line {number}"
        finally:
            modes.put_back(before)
        outcome = ended(engine)
        assert outcome in allowed, f"line {number}"
        assert outcome[2] == max(outcome[1]), f"line {number}"


@pytest.mark.draws(1)
@pytest.mark.parametrize("sampled", [pytest.param(30, id="some"), pytest.param(None, marks=pytest.mark.slow, id="all")])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_after_an_interrupt_of_a_step_in_backward_the_count_is_that_of_the_states(param_dtype, sampled):
    """Nothing takes back what was updated in backward: each element is before the step or after it."""
    options = {"update_in_backward": True, "param_dtype": param_dtype, "reduce_bucket_size": 64}

    def all_of(engine):
        engine.flush()
        entries = engine.optimizer.state.values()
        params = engine.module.parameters()
        states = [[entry["exp_avg"], entry["exp_avg_sq"], p.detach()] for entry, p in zip(entries, params, strict=True)]
        rows = [torch.stack([t.reshape(-1).float() for t in each]) for each in states]
        return rows, [float(entry["step"]) for entry in entries], engine.optimizer.updates

    before, whole = begun(options), begun(options)
    step(whole, 2)
    old, new = all_of(before)[0], all_of(whole)[0]
    counted = begun(options)
    numbers = [*first_passes(lambda: step(counted, 2), modes.FILES).values()]
    for number in numbers[:: max(len(numbers) // sampled, 1)] if sampled else numbers:
        engine = begun(options)
        mode = modes.modes()
        with suppress(FewerLines):
            interrupt_at(number, lambda engine=engine: step(engine, 2), modes.FILES)
        assert modes.modes() == mode, f"line {number}"
        engine = after("step", engine, None)
        rows, steps, updates = all_of(engine)
        for mine, was, becomes, count in zip(rows, old, new, steps, strict=True):
            updated = (mine == becomes).all(dim=0)
            assert ((mine == was).all(dim=0) | updated).all(), f"line {number}"
            assert count == 1 + updated.any(), f"line {number}"
        assert updates == max(steps), f"line {number}"
        step(engine, 3)
        assert engine.optimizer.updates == updates + 1
        engine.close()


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
