"""Several engines in one process: frozen ones, those that share tensors, and those that take turns."""

import gc
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from frontends.torch import OffloadedAdamW, gathered_parameters, wrap
from offload_core import ParameterError, StateError
from tests.support.processes import on_ranks
from tests.support.torch_models import assert_all_same, batch, everything, loss_of, make, on, same_bits, step

SHARDS = {"stage": 3, "param_persistence_threshold": 0}
IN_SHARDS = {**SHARDS, "offload_param": "cpu"}
PLACES = {"stage 2": {}, "stage 3": SHARDS, "streamed": IN_SHARDS}


@pytest.fixture(params=["cpu", "accelerator"])
def device(request):
    """Where models are made: in host memory, or on an accelerator."""
    if request.param == "cpu":
        yield "cpu"
    else:
        with on(place := request.getfixturevalue("accelerator")):
            yield place
            torch.accelerator.synchronize()


# --- an engine that trains nothing -------------------------------------------------------------------


def frozen(seed=0):
    return make(seed=seed).requires_grad_(False).eval()


@pytest.mark.quick
@pytest.mark.parametrize("fields", PLACES.values(), ids=PLACES)
def test_a_frozen_model_computes_and_has_no_states(device, fields, tmp_path):
    expected = frozen()
    engine = wrap(frozen(), **fields)
    with torch.no_grad():
        assert same_bits(engine(batch(0)), expected(batch(0)))
    assert same_bits(engine(batch(1)), expected(batch(1)))
    assert not engine.optimizer.slots
    assert set(engine.memory_report().host) <= {"parameters on the host"}
    str(engine.memory_report())
    engine.export_safetensors(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    for name, value in expected.state_dict().items():
        assert same_bits(exported[name], value), name
    saved = engine.save_checkpoint(tmp_path / "saved")
    other = wrap(frozen(seed=1), **fields)
    other.load_checkpoint(saved)
    for each in (engine, other):
        each.optimizer.load_state_dict(each.optimizer.state_dict())
        each.close()
        for name, value in expected.state_dict().items():
            assert same_bits(each.module.state_dict()[name], value), name


@pytest.mark.parametrize("fields", PLACES.values(), ids=PLACES)
def test_a_frozen_model_says_that_it_trains_nothing_until_it_is_unfrozen(fields):
    engine, trained = wrap(frozen(), lr=1e-2, **fields), wrap(make(), lr=1e-2, **fields)
    loss = trained(batch(0)).pow(2).mean() + engine(batch(0)).pow(2).mean()
    for act in (lambda: engine.backward(loss), engine.step):
        with pytest.raises(StateError, match="trains nothing: no parameter of Sequential requires a gradient"):
            act()
    trained.backward(loss)
    assert trained.step().updated
    assert not engine.optimizer.slots
    engine.module.requires_grad_(True)
    alone = wrap(make(), lr=1e-2, **fields)
    for seed in range(3):
        assert step(engine, seed).updated
        assert step(alone, seed).updated
    assert_all_same(everything(engine), everything(alone))


def test_a_gradient_passes_through_a_frozen_engine():
    """As that of a reward model reaches the actor."""
    found = []
    for fields in (None, SHARDS, IN_SHARDS):
        first = nn.Linear(32, 32, bias=False, device="cpu")
        nn.init.eye_(first.weight)
        reward = frozen() if fields is None else wrap(frozen(), **fields)
        reward(first(batch(0))).sum().backward()
        found.append(first.weight.grad)
    assert found[0].abs().sum() > 0
    assert_all_same(found[1:], [found[0]] * 2)


def test_an_optimizer_alone_still_needs_something_to_train():
    with pytest.raises(ParameterError, match="no parameter requires a gradient"):
        OffloadedAdamW(frozen().parameters())


def test_ranks_hold_shards_of_a_frozen_model():
    @on_ranks(2)
    def found(rank):
        result = {}
        for name, fields in PLACES.items():
            engine = wrap(frozen(seed=rank), **fields)  # rank 0's values
            with torch.no_grad():
                outputs = [engine(batch(0))]
            with gathered_parameters(engine.module.parameters()):
                values = [p.clone() for p in engine.module.parameters()]
            result[name] = outputs, values, engine.memory_report().device_bytes, len(engine.optimizer.slots)
            engine.close()
        return result

    expected = frozen()
    size = sum(p.nbytes for p in expected.parameters())
    for of_rank in found:
        for name, (outputs, values, n_bytes, n_slots) in of_rank.items():
            assert_all_same(outputs, [expected(batch(0))])
            assert_all_same(values, expected.parameters())
            padding = 64 * len(values)
            least = {"stage 2": size, "stage 3": size // 2, "streamed": 0}[name]
            assert least <= n_bytes <= least + padding * (name == "stage 3")
            assert n_slots == 0


# --- tensors that two models share -------------------------------------------------------------------


class WithHead(nn.Module):
    """A trunk and a head of its own, as actor and critic have them."""

    def __init__(self, trunk, seed):
        super().__init__()
        self.trunk = trunk
        torch.manual_seed(seed)
        self.head = nn.Linear(16, 4).to(next(trunk.parameters()).device)

    def forward(self, x):
        return self.head(self.trunk(x))


def pair(*, freeze=True):
    trunk = nn.Sequential(make(), nn.BatchNorm1d(16, device=next(make().parameters()).device)).requires_grad_(
        not freeze
    )
    return WithHead(trunk, 1), WithHead(trunk, 2)


def test_two_engines_share_a_frozen_trunk_and_its_buffers(device):
    actor, critic = (wrap(model, lr=1e-2, gradient_clipping=1.0) for model in pair())
    plain = pair()
    alone = [torch.optim.AdamW(model.head.parameters(), lr=1e-2, fused=True) for model in plain]
    for seed in range(4):
        for engine, model, optimizer in zip((actor, critic), plain, alone, strict=True):
            step(engine, seed)
            loss_of(model, seed).backward()
            nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for engine, model in zip((actor, critic), plain, strict=True):
        for name, value in model.state_dict().items():
            assert torch.allclose(engine.module.state_dict()[name].float(), value.float(), atol=1e-5), name
    assert actor.module.trunk[1].num_batches_tracked == 8
    actor.close()
    assert step(critic, 5).updated


def unchanged(model, before):
    for name, value in model.state_dict().items():
        assert same_bits(value, before[name]), name


@pytest.mark.parametrize(("first", "second"), [({}, IN_SHARDS), (IN_SHARDS, {}), (IN_SHARDS, IN_SHARDS)])
def test_a_shared_trunk_in_shards_is_refused_and_nothing_changes(first, second):
    models = pair()
    before = deepcopy(models[0].state_dict())
    actor = wrap(models[0], lr=1e-2, **first)
    with pytest.raises(StateError, match=r"'trunk.0.0.weight' is (there in shards of|used by) another engine"):
        wrap(models[1], lr=1e-2, **second)
    assert step(actor, 0).updated
    actor.close()
    unchanged(models[0].trunk[0], {k.removeprefix("trunk.0."): v for k, v in before.items()})
    engine = wrap(models[1], lr=1e-2, **second)
    assert step(engine, 0).updated


@pytest.mark.parametrize("fields", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("others", PLACES.values(), ids=PLACES)
def test_two_engines_over_one_trained_parameter_are_refused_and_nothing_changes(fields, others):
    models = pair(freeze=False)
    critic = deepcopy(models[1].head.state_dict())
    actor = wrap(models[0], lr=1e-2, **fields)
    with pytest.raises(StateError, match=r"'trunk.0.0.weight' (already belongs|is there in shards|is used by)"):
        wrap(models[1], lr=1e-2, **others)
    unchanged(models[1].head, critic)
    alone = wrap(pair(freeze=False)[0], lr=1e-2, **fields)
    for seed in range(2):
        step(actor, seed)
        step(alone, seed)
    assert_all_same(everything(actor), everything(alone))


def test_a_trunk_that_one_engine_trains_is_read_by_another_that_does_not():
    models, plain = pair(freeze=False), pair(freeze=False)
    actor = wrap(models[0], lr=1e-2)
    models[0].trunk.requires_grad_(False)
    critic = wrap(models[1], params=models[1].head.parameters(), lr=1e-2)
    alone = wrap(plain[0], lr=1e-2)
    for seed in range(3):
        models[0].trunk.requires_grad_(True)
        step(actor, seed)
        step(alone, seed)
        models[0].trunk.requires_grad_(False)
        assert same_bits(critic.module.trunk[0](batch(9)), plain[0].trunk[0](batch(9)))
        assert same_bits(critic(batch(9)), critic.module.head(critic.module.trunk(batch(9))))
        plain[0].trunk(batch(9)), plain[0].trunk(batch(9))  # the statistics of the norm
        step(critic, seed)
        plain[0].trunk(batch(seed))
    assert_all_same(actor.module.parameters(), alone.module.parameters())


@pytest.mark.parametrize("other", [OffloadedAdamW, lambda params: wrap_of(params)], ids=["optimizer", "engine"])
def test_a_parameter_that_is_trained_elsewhere_never_goes_to_shards(other):
    models = pair(freeze=False)
    owner = other(models[0].trunk.parameters())
    models[0].trunk.requires_grad_(False)
    with pytest.raises(StateError, match="'trunk.0.0.weight' is used by another engine or optimizer, which needs it"):
        wrap(models[1], lr=1e-2, **IN_SHARDS)
    assert next(models[0].parameters()).untyped_storage().nbytes()
    owner.close()
    wrap(models[1], lr=1e-2, **IN_SHARDS)


def wrap_of(params):
    holder = nn.Module()
    holder.list = nn.ParameterList(params)
    return wrap(holder)


@pytest.mark.parametrize("asked", ["param_dtype", "buffer_dtype"])
def test_two_engines_may_not_give_a_shared_tensor_two_types(asked):
    models = pair()
    actor = wrap(models[0], lr=1e-2)
    before = deepcopy(models[1].state_dict())
    match = f"'trunk.* is used by another engine or optimizer as torch.float32, and {asked}='bfloat16' would cast it"
    with pytest.raises(ParameterError, match=match):
        wrap(models[1], lr=1e-2, **{asked: "bfloat16"})
    unchanged(models[1], before)
    assert step(actor, 0).updated
    actor.close()
    wrap(models[1], lr=1e-2, **{asked: "bfloat16"})


def test_a_model_is_wrapped_anew_once_its_first_engine_is_garbage():
    models = pair()
    cycle = [wrap(models[0], lr=1e-2)]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        wrap(models[1], lr=1e-2, **IN_SHARDS)
    finally:
        gc.enable()
