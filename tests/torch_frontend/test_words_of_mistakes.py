"""What a beginner does wrong, and the words that say what to do instead."""

import re

import pytest
import torch
from torch import nn

from frontends.torch import OffloadedAdamW, wrap
from offload_core import ConfigError, GradientError, ParameterError, StateError


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


MADE = 'expected a word; wrap() makes the optimizer: give its name and settings, such as optimizer="adamw", lr=1e-3'
CALLS = {
    "an optimizer": (
        lambda m: wrap(m, optimizer=torch.optim.AdamW(m.parameters())),
        f"optimizer: got an AdamW, {MADE}",
    ),
    "our own": (
        lambda m: wrap(m, optimizer=OffloadedAdamW(make().parameters())),
        f"optimizer: got an OffloadedAdamW, {MADE}",
    ),
    "its class": (lambda m: wrap(m, optimizer=torch.optim.SGD), f"optimizer: got SGD, {MADE}"),
    "a rate": (lambda m: wrap(m, 3e-4), "config: got a float, .*None; a learning rate is lr=0.0003"),
    "parameters": (
        lambda m: wrap(m.parameters()),
        "model: got a generator, expected a torch.nn.Module; parameters without their model are for "
        "OffloadedAdamW(params, lr=...)",
    ),
    "a model for params": (
        lambda m: wrap(m, params=nn.Linear(2, 2)),
        "params: got a Linear, expected parameters or groups",
    ),
    "None": (lambda m: wrap(None), "model: got None, expected a torch.nn.Module"),
    "an object with an address": (
        lambda m: wrap(m, lr=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(m.parameters(), lr=1.0), 1)),
        "lr: got a StepLR, expected a number",
    ),
    "a text": (
        lambda m: wrap(m, '{"lr": 1e-3}'),
        "cannot be read (No such file or directory); expected the path of a DeepSpeed configuration (a configuration "
        "itself is given as a dict: json.loads(text))",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_meant_is_told_what_to_write(name):
    call, said = CALLS[name]
    with pytest.raises((ConfigError, ParameterError)) as error:
        call(make())
    message = str(error.value)
    assert re.search(re.escape(said).replace(r"\.\*", ".*"), message)
    assert "\n" not in message
    assert " at 0x" not in message


def after_backward(change):
    model = make()
    engine = wrap(model, lr=1e-3)
    engine.backward(engine(torch.ones(2, 8)).sum())
    return change(model, engine)


def scaled(model, engine):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(engine(torch.ones(2, 8)).sum()).backward()
    scaler.step(engine.optimizer)


OTHERS = {
    "SGD": (lambda m, e: torch.optim.SGD(m.parameters(), lr=0.1).step(), "SGD reads a gradient"),
    "AdamW": (lambda m, e: torch.optim.AdamW(m.parameters()).step(), "AdamW reads a gradient"),
    "fused": (lambda m, e: torch.optim.Adam(m.parameters(), fused=True).step(), "Adam reads a gradient"),
    "GradScaler": (scaled, "a GradScaler reads a gradient"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_optimizer_or_a_scaler_is_told_one_remedy(name):
    use, said = OTHERS[name]
    remedy = "no GradScaler is needed" if name == "GradScaler" else "expected engine.step() in place of that optimizer"
    with pytest.raises(GradientError, match=rf"{said} that has already left for the host; expected .*") as error:
        after_backward(use)
    assert remedy in str(error.value)
    assert "whole_gradient" not in str(error.value)


@pytest.mark.parametrize("change", ["bfloat16", "double", "half"])
def test_a_model_that_was_cast_after_wrap_fails_in_our_words_at_once(change):
    def cast(model, engine):
        engine.step()
        getattr(model, change)()
        engine(torch.ones(2, 8))

    with pytest.raises(ParameterError, match=r"'0.weight' is .* and was .*float32.*: resize, cast, move"):
        after_backward(cast)


def test_a_model_that_was_moved_to_meta_fails_in_our_words_at_once():
    def move(model, engine):
        engine.step()
        model.to("meta")
        engine(torch.ones(2, 8))

    with pytest.raises((StateError, ParameterError), match="replaced in the module since wrap|expected no change"):
        after_backward(move)


def test_an_input_that_does_not_fit_keeps_torchs_own_words():
    engine = wrap(make(), lr=1e-3)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        engine(torch.ones(2, 9))
