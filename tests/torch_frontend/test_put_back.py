"""Weights that are taken out and put back: training goes on as if nothing had happened."""

import pytest
import torch
from torch import nn

from frontends.torch import gathered_parameters, wrap
from tests.support.torch_models import batch, make, place, same_bits
from tests.support.ways import STAGE_3, WAYS

SPLIT = {"stage 3, split": {**STAGE_3, "state_format": "bf16"}}


def exchanged(engine, tmp_path, meanwhile):
    """As for an average of weights: all are halved, and get their values back."""
    params = [*engine.module.parameters()]
    with gathered_parameters(params, modifier_rank=0), torch.no_grad():
        before = [p.clone() for p in params]
        for p in params:
            p.mul_(0.5)
    meanwhile(engine, tmp_path)
    with gathered_parameters(params, modifier_rank=0), torch.no_grad():
        for p, old in zip(params, before, strict=True):
            p.copy_(old)


def loaded(engine, tmp_path, meanwhile):
    """As in ``load_state_dict`` there and back."""
    params = [*engine.module.parameters()]
    with gathered_parameters(params, modifier_rank=0):
        before = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.module.load_state_dict({name: value + 1 for name, value in before.items()})
    meanwhile(engine, tmp_path)
    with gathered_parameters(params, modifier_rank=0):
        engine.module.load_state_dict(before)


MEANWHILE = {
    "nothing": lambda engine, folder: None,
    "a save": lambda engine, folder: engine.save_checkpoint(folder),
    "an export": lambda engine, folder: engine.export_safetensors(folder),
    "a flush": lambda engine, folder: engine.flush(),
}


def trained(act, **fields):
    model = nn.Sequential(make(), nn.Linear(16, 4)).to(place())
    engine = wrap(model, **{"lr": 1e-5, "param_dtype": "bfloat16", **fields})
    losses = []
    for seed in range(6):
        loss = engine(batch(seed, torch.bfloat16)).float().sub(1).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if seed < 5:
            act(engine)
    engine.flush()
    return losses, [engine.optimizer.whole_states(p)["master"] for p in engine.parameters()]


@pytest.mark.draws(4)
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("act", [exchanged, loaded])
@pytest.mark.parametrize("fields", (WAYS | SPLIT).values(), ids=WAYS | SPLIT)
def test_weights_that_are_put_back_have_their_master_weights(fields, act, tmp_path):
    torch.manual_seed(0)
    expected = trained(lambda engine: None, **fields)
    torch.manual_seed(0)
    found = trained(lambda engine: act(engine, tmp_path, MEANWHILE["nothing"]), **fields)
    assert found[0] == expected[0]
    for got, want in zip(found[1], expected[1], strict=True):
        assert same_bits(got, want)


@pytest.mark.draws(4)
@pytest.mark.parametrize("meanwhile", MEANWHILE.values(), ids=MEANWHILE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fields", [{}, STAGE_3], ids=["stage 2", "stage 3"])
def test_what_is_saved_while_others_are_in_place_changes_nothing(fields, dtype, meanwhile, tmp_path):
    fields = {**fields, "param_dtype": dtype, "loss_scale": 1.0}
    if dtype == "float16":
        fields["cast_inputs"] = True
    torch.manual_seed(0)
    expected = trained(lambda engine: None, **fields)
    torch.manual_seed(0)
    assert trained(lambda engine: exchanged(engine, tmp_path, meanwhile), **fields)[0] == expected[0]


def test_an_element_that_stays_changed_is_followed_and_the_others_keep_their_low_bits():
    torch.manual_seed(0)
    engine = wrap(nn.Linear(8, 8), lr=1e-3, param_dtype="bfloat16", **STAGE_3)
    engine.backward(engine(torch.ones(2, 8)).float().pow(2).mean())
    engine.step()
    [weight] = [p for name, p in engine.module.named_parameters() if name == "weight"]
    before = engine.optimizer.whole_states(weight)["master"]
    with gathered_parameters(weight, modifier_rank=0), torch.no_grad():
        kept = weight.clone()
        weight.fill_(3.0)
    with gathered_parameters(weight, modifier_rank=0), torch.no_grad():
        weight.copy_(kept)
        weight[2] = 7.0
    after = engine.optimizer.whole_states(weight)["master"]
    assert (after[2] == 7.0).all()
    assert same_bits(torch.cat([after[:2], after[3:]]), torch.cat([before[:2], before[3:]]))


@pytest.mark.parametrize("fields", [{}, STAGE_3], ids=["stage 2", "stage 3"])
def test_masters_that_are_loaded_replace_what_was_taken_out(fields, tmp_path):
    """A write after the load is compared with what was loaded, not with what was there before."""
    engine = wrap(nn.Linear(8, 8), lr=1e-3, param_dtype="bfloat16", **fields)
    [weight] = [p for name, p in engine.module.named_parameters() if name == "weight"]
    masters = []
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).float().pow(2).mean())
        engine.step()
        engine.save_checkpoint(tmp_path)
        masters.append(engine.optimizer.whole_states(weight)["master"])
    with gathered_parameters(weight, modifier_rank=0), torch.no_grad():
        weight.fill_(3.0)
    engine.optimizer.whole_states(weight)  # follows it
    engine.load_checkpoint(tmp_path / "step-00000001")
    with gathered_parameters(weight, modifier_rank=0), torch.no_grad():
        weight[2] = 7.0
    got = engine.optimizer.whole_states(weight)["master"]
    want = masters[0].index_fill(0, torch.tensor([2]), 7.0)
    assert same_bits(got, want)
