"""Several engines in one process: frozen ones, those that share tensors, and those that take turns."""

import gc
import threading
import time
from copy import deepcopy
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from frontends.torch import OffloadedAdamW, gathered_parameters, wrap
from frontends.torch.internals.private import no_read
from offload_core import ParameterError, StateError
from offload_core.memory.working_memory import blocks_of, bytes_held, bytes_in_turn
from tests.support import simulated
from tests.support.processes import SECONDS, forked, on_ranks
from tests.support.torch_models import assert_all_same, batch, everything, loss_of, make, on, same_bits, step

SHARDS = {"stage": 3, "param_persistence_threshold": 0}
IN_SHARDS = {**SHARDS, "offload_param": "cpu"}
PLACES = {"stage 2": {}, "stage 3": SHARDS, "streamed": IN_SHARDS}


@pytest.fixture(autouse=True)
def prepared():
    """Torch knows of the simulated device before its first backward."""
    if simulated.why_not() is None:
        simulated.prepare()


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


def no_reads(model):
    """The model's parameters, as tensors that may be looked at while they are released."""
    with no_read():
        return [p.detach() for p in model.parameters()]


def frozen(seed=0):
    return make(seed=seed).requires_grad_(False).eval()


@pytest.mark.draws(2)
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


@pytest.mark.draws(1)
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


def test_a_trunk_of_two_engines_is_released_with_one_of_them_unless_it_is_kept(accelerator):
    with on(accelerator):
        actor, critic = (wrap(model, lr=1e-2) for model in pair())
        with actor.released(), pytest.raises(StateError, match="released parameters have no memory on the device"):
            critic(batch(0))
        with actor.released(keep=["trunk"]):
            assert step(critic, 0).updated
        assert step(actor, 0).updated
        for engine in (actor, critic):
            engine.close()


@pytest.mark.parametrize("freeze", [False, True])
def test_a_tensor_that_was_released_and_is_kept_this_time_can_be_read(accelerator, freeze):
    with on(accelerator):
        model = make()
        model[0].requires_grad_(not freeze)
        engine = wrap(model, lr=1e-2)
        step(engine, 0)
        expected = model[0].weight.detach().cpu().clone()
        with engine.released():
            pass
        with engine.released(keep=["0"]):
            assert same_bits(model[0].weight, expected)
        engine.close()


@pytest.mark.draws(2)
@pytest.mark.parametrize("fields", PLACES.values(), ids=PLACES)
def test_a_frozen_engine_is_released_and_restored(device, fields, tmp_path):
    expected, engine = frozen()(batch(0)), wrap(frozen(), **fields)
    for _ in range(2):
        engine.release()
        engine.restore()  # nobody reads what it brings back before the next release
        with engine.released():
            with pytest.raises(StateError, match="released parameters have no memory"):
                engine(batch(0))
            saved = engine.save_checkpoint(tmp_path)
            if device != "cpu":
                assert all(not p.untyped_storage().nbytes() for p in no_reads(engine.module))
        assert same_bits(engine(batch(0)), expected)
    other = wrap(frozen(seed=1), **fields)
    other.load_checkpoint(saved)
    assert same_bits(other(batch(0)), expected)
    for each in (engine, other):
        each.close()


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


@pytest.mark.draws(1)
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


@pytest.mark.draws(1)
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


@pytest.mark.draws(2)
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


# --- memory that engines use in turn -----------------------------------------------------------------

WAYS = {
    "stage 2": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "clipped": {"gradient_clipping": 0.05},
    "early": {"update_in_backward": True},
    "serial": {"schedule": "serial"},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 1},
    "streamed": IN_SHARDS,
}
WORKING = ("gradients on the host", "staging")


def trainer(seed, **fields):
    return wrap(make(torch.bfloat16, seed=seed), lr=1e-2, reduce_bucket_size=500, **fields)


def working_bytes(engine):
    host = engine.memory_report().host
    return sum(host[what] for what in WORKING)


def update(engine, number):
    """Train until the next update has ended."""
    for micro_step in range(engine.offload_config.gradient_accumulation_steps):
        step(engine, 10 * number + micro_step)
    engine.flush()


def updates(engine, numbers):
    for number in numbers:
        update(engine, number)


def six_steps(engine, between=lambda: None):
    for each in range(6):
        engine.backward(loss_of(engine, each))
        between()
        engine.step()


def trained_alone(fields, seed, train):
    engine = trainer(seed, **fields)
    train(engine)
    terms = engine.optimizer.core._pipeline.buckets.terms
    planned = terms.working_sizes(engine.optimizer.core.params, terms.device_budget)
    assert sum(bytes_in_turn([sizes]) for sizes in planned.values()) == working_bytes(engine)
    found = everything(engine), working_bytes(engine), bytes_held()
    engine.close()
    return found


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_engines_that_take_turns_have_the_memory_of_one_and_the_bits_of_each_alone(fields):
    @forked
    def found():
        with simulated.available(), on(simulated.NAME):
            alone = [trained_alone(fields, seed, partial(updates, numbers=range(4))) for seed in range(2)]
            between, engines = bytes_held(), [trainer(seed, **fields) for seed in range(2)]
            held = [bytes_held()]
            for each in range(4):
                for engine in engines:
                    update(engine, each)
                    held.append(bytes_held())
            reference = wrap(make(seed=3).requires_grad_(False), **IN_SHARDS)
            reference(batch(0))
            with engines[0].released():
                update(engines[1], 4)
                held.append(bytes_held())
            reports = [engine.memory_report() for engine in (*engines, reference)]
            values = [everything(engine) for engine in engines]
            engines[0].close()
            after = bytes_held(), engines[1].memory_report().shared
            engines[1].close()
            return alone, between, held, reports, values, after, bytes_held()

    alone, between, held, reports, values, after, end = found
    ((states, needed, held_alone), (others, *_)) = alone
    assert needed == held_alone > 0
    assert (between, set(held), end) == (0, {needed}, 0)
    assert_all_same(values[0], states)
    assert len(values[1]) == len(others)
    assert [report.shared for report in reports] == [needed, needed, 0]
    assert "in turn with other engines" in str(reports[0])
    assert "in turn" not in str(reports[2])
    assert after == (needed, 0)


@pytest.mark.states_on_host
def test_an_engine_of_other_sizes_adds_what_is_lacking():
    @forked
    def found():
        with simulated.available(), on(simulated.NAME):
            large = trainer(0)
            before = bytes_held()
            small = wrap(nn.Linear(16, 8).to(simulated.NAME, torch.bfloat16), reduce_bucket_size=500)
            both = bytes_held()
            wide = wrap(nn.Linear(64, 64).to(simulated.NAME, torch.bfloat16), reduce_bucket_size=1000)
            more = bytes_held()
            shared = [engine.memory_report().shared for engine in (large, small, wide)]
            needed = [working_bytes(engine) for engine in (large, small, wide)]
            del large
            gc.collect()
            return before, both, more, shared, needed, bytes_held()

    before, both, more, shared, needed, end = found
    assert before == both == needed[0]
    assert max(needed) < more < sum(needed)
    assert shared[1] == needed[1]
    assert 0 < shared[0] < needed[0]
    assert more == sum(needed) - shared[1] - (needed[0] + needed[2] - more)
    assert needed[2] <= end < more


def in_threads(*acts):
    """Make these calls at the same time; an error of one is raised."""
    errors = []

    def run(act):
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[act]) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "they wait for each other"
    if errors:
        raise errors[0]


@pytest.mark.states_on_host
@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_engines_in_two_threads_have_memory_for_both_and_the_bits_of_each_alone(fields):
    """Both hold gradients at a time."""

    @forked
    def found():
        with simulated.available(), on(simulated.NAME):
            alone = [trained_alone(fields, seed, six_steps) for seed in range(2)]
            engines, both, held = [trainer(seed, **fields) for seed in range(2)], threading.Barrier(2), []

            def between():
                both.wait()
                held.append(bytes_held())
                both.wait()

            in_threads(*(partial(six_steps, engine, between) for engine in engines))
            values = [everything(engine) for engine in engines]
            for engine in engines:
                engine.close()
            return alone, max(held), values, bytes_held()

    alone, most, values, end = found
    for (states, *_), value in zip(alone, values, strict=True):
        assert_all_same(value, states)
    [needed] = {each for _, each, _ in alone}
    assert needed <= most <= 2 * needed
    if "update_in_backward" not in fields:  # else the gradients of most are gone
        assert most > needed
    assert end == 0


def test_ranks_whose_engines_take_turns_or_run_in_threads_get_the_bits_of_each_alone(drawn):
    """One rank's threads are late, so that other engines than on the other rank find memory free."""
    settings = dict(drawn([*PLACES.items(), ("early", {"update_in_backward": True})], 1))

    @on_ranks(2)
    def found(rank):
        def train(engine, seeds, late):
            for each in seeds:
                engine.backward(loss_of(engine, 10 * each + rank))
                if late:
                    time.sleep(0.01)
                engine.step()

        def new(seed, **fields):
            return wrap(make(seed=seed), lr=1e-2, reduce_bucket_size=500, **fields)

        result = {}
        for name, fields in settings.items():
            values, needed = [], []
            for seed in range(2):
                engine = new(seed, **fields)
                train(engine, range(4), late=False)
                values.append(everything(engine))
                needed.append(bytes_held())
                engine.close()
            engines = [new(seed, **fields) for seed in range(2)]
            needed.append(bytes_held())
            n_blocks = [len(blocks_of(None).sizes)]
            for each in range(2):
                for engine in engines:
                    train(engine, [each], late=False)
            in_threads(*(partial(train, e, (2, 3), i == rank) for i, e in enumerate(engines)))
            n_blocks.append(len(blocks_of(None).sizes))
            result[name] = values, [everything(engine) for engine in engines], needed, n_blocks
            for engine in engines:
                engine.close()
        return result

    for of_rank in found:
        for name, (alone, together, needed, (n_alone, n_together)) in of_rank.items():
            for expected, got in zip(alone, together, strict=True):
                assert_all_same(got, expected)
            assert len(set(needed)) == 1, name
            assert n_alone <= n_together <= 2 * n_alone, name


# --- phases of engines that share frozen layers --------------------------------------------------------


def test_engines_that_share_frozen_layers_release_them_one_after_the_other(accelerator):
    """What one brings back has arrived before the other one releases it, and nobody reads it meanwhile."""
    with simulated.delays(copy=50_000, kernel=1):
        trunk = nn.Linear(32, 64).to(accelerator).requires_grad_(False)
        expected = trunk.weight.detach().cpu().clone()
        first, second = (wrap(nn.Sequential(trunk, nn.Linear(64, 8).to(accelerator)), lr=1e-2) for _ in range(2))
        for _ in range(3):
            first.release()
            first.restore()
            second.release()
            first.release()
            with pytest.raises(StateError, match="released parameters have no memory"):
                trunk.weight.sum()
            second.restore()
            first.restore()
            first.flush()  # it has brought nothing back of what the second one has
            assert same_bits(trunk.weight.detach().cpu(), expected)
        second.release()
        first.close()
        with pytest.raises(StateError, match="released parameters have no memory"):
            trunk.weight.sum()
        second.close()
        assert same_bits(trunk.weight.detach().cpu(), expected)
