"""Ranks that exchange buckets between simulated devices, by a group that is as late as nccl."""

import re
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import offload_core.support.worker
from frontends.torch import init, wrap
from frontends.torch.ranks.private_group import timeout_of
from offload_core.device.trace import TO_HOST, UPDATE
from tests.support import experts, simulated
from tests.support.one_thread import Threads
from tests.support.processes import on_ranks
from tests.support.simulated import collectives
from tests.support.torch_rank import batch, bits, make, whole_bits
from tests.support.traces import read
from tests.support.wait_mutants import DROPPED, Change, by_name, made, mutants_of

pytestmark = pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")

STREAMED = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}
SAVED = ("stage 2", "streamed")
SETTINGS = {
    "stage 1": {"stage": 1},
    "stage 2": {"gradient_clipping": 0.05},
    "native": {"reduction": "native", "param_dtype": "bfloat16"},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 1},
    "serial": {"schedule": "serial", "gradient_clipping": 0.05},
    "early": {"update_in_backward": True, "param_dtype": "bfloat16"},
    "fp16": {"param_dtype": "float16", "loss_scale": "dynamic", "initial_loss_scale": 2.0**20},
    "stage 3": {"stage": 3, "param_persistence_threshold": 0},
    "muon": {"optimizer": "muon", "param_dtype": "bfloat16"},
    "muon, streamed": {**STREAMED, "optimizer": "muon", "gradient_clipping": 0.05},
    "streamed": {**STREAMED, "param_dtype": "bfloat16"},
    "streamed, early": {**STREAMED, "update_in_backward": True, "param_dtype": "bfloat16"},
    "stage 3, early": {"stage": 3, "param_persistence_threshold": 20, "update_in_backward": True},
    "on the device": {"offload_optimizer": None, "gradient_clipping": 0.05, "param_dtype": "bfloat16"},
    "half on the device": {"device_states_bytes": 0.5, "state_format": "8bit", "param_dtype": "bfloat16"},
    "muon on the device": {"offload_optimizer": None, "optimizer": "muon", "param_dtype": "bfloat16"},
    "stage 3 on the device": {"offload_optimizer": None, "stage": 3, "param_persistence_threshold": 20},
    "early on the device": {"offload_optimizer": None, "update_in_backward": True, "param_dtype": "bfloat16"},
    "streamed, clipped": {**STREAMED, "gradient_clipping": 0.05, "schedule": "delayed", "delay_warmup_steps": 1},
}


@pytest.fixture(autouse=True)
def prepared():
    """The devices are built before ranks need them."""
    simulated.prepare()


on_devices = on_ranks(2, backend=collectives.BACKEND)


def device_of(rank):
    device = torch.device(simulated.NAME, rank)
    torch.accelerator.set_device_index(device)
    return device


def train(device, rank, **fields):
    engine = wrap(make().to(device), lr=1e-2, reduce_bucket_size=1000, gradient_accumulation_steps=2, **fields)
    norms = []
    for seed in range(6):
        engine.backward(engine(batch(seed, rank).to(device)).float().pow(2).mean())
        norms.append(engine.step().grad_norm)
    engine.flush()
    found = [whole_bits(engine), norms, type(engine.optimizer.core.device).__name__]
    engine.close()
    return found


def everywhere(cases, rank):
    device, result = device_of(rank), {}
    assert dist.get_default_backend_for_device(simulated.NAME) == collectives.BACKEND
    for name, seed in cases:
        if name not in result:
            result[name] = [train("cpu", rank, **SETTINGS[name])]
        with simulated.delays(seed=seed + 10 * rank, kernel=200, copy=2000):
            result[name].append(train(device, rank, **SETTINGS[name]))
    return result


@pytest.mark.long("several trainings on two ranks or more")
def test_ranks_on_devices_give_the_bits_of_ranks_on_the_host(drawn):
    cases = drawn([(name, seed) for name in SETTINGS for seed in range(2)], 4)
    results = on_devices(partial(everywhere, cases))
    for name in results[0]:
        host, *late = [found for result in results for found in result[name][:1]] + [
            found for result in results for found in result[name][1:]
        ]
        expected = results[0][name][0]
        assert host == results[1][name][0]
        for found, norms, kind in late[1:]:
            assert [found, norms] == expected[:2], name
            assert kind == "DeviceRanks", name


def mixtures(rank):
    """Experts as modules of their own: in stage 2 on the host, and in leaf modules on devices of which one is late."""
    device, runs, result = device_of(rank), [("cpu", {"stage": 2}, 0)], []
    runs += [(device, {**STREAMED, "max_reuse_distance": 0, "leaf_modules": ["Experts"]}, seed) for seed in (1, 2)]
    for where, fields, seed in runs:
        with simulated.delays(seed=seed + 10 * rank, kernel=200 * rank, copy=2000 * (1 - rank)):
            engine = wrap(experts.deep("layer").to(where), lr=1e-2, reduce_bucket_size=1000, **fields)
            for step in range(3):
                engine.backward(engine(experts.rows(2 * step + rank).to(where)).square().mean())
                engine.step()
            result.append(whole_bits(engine))
            engine.close()
    return result


@pytest.mark.slow
def test_ranks_on_devices_run_other_experts_of_leaf_modules_and_have_the_bits_of_stage_2_on_the_host():
    first, second = on_devices(mixtures)
    assert first == second
    assert len(set(first)) == 1


def saved(names, folder, rank):
    """Saved by both in mid-run, in stages 2 and 3, and gone on with. Their batches are those of one rank."""
    device, result = device_of(rank), {}
    for name in names:
        engine = wrap(make().to(device), lr=1e-2, reduce_bucket_size=1000, **SETTINGS[name])
        for seed in range(6):
            if seed == 3:
                engine.save_checkpoint(folder / name, wait=False)
            engine.backward(engine(batch(seed, 0).to(device)).float().pow(2).mean())
            engine.step()
        engine.wait_for_checkpoint()
        result[name] = whole_bits(engine)
        engine.close()
    return result


def test_what_two_ranks_on_devices_saved_one_on_the_host_resumes_to_the_same_bits(tmp_path, drawn):
    names = drawn(SAVED, 1)
    expected, other = on_devices(partial(saved, names, tmp_path))
    assert expected == other
    for name in names:
        fields = {"gradient_clipping": 0.05} if name == "stage 2" else {"param_dtype": "bfloat16"}
        engine = wrap(make(seed=1), lr=1e-2, **fields)
        engine.load_checkpoint(tmp_path / name)
        for seed in range(3, 6):
            engine.backward(engine(batch(seed, 0)).float().pow(2).mean())
            engine.step()
        assert whole_bits(engine) == expected[name], name


def built(names, folder, rank):
    """Models that are built on devices, whole and in shards; the second step of each is traced."""
    device, result = device_of(rank), {}
    for name in names:
        fields = {"lr": 1e-2, "reduce_bucket_size": 1000, **SETTINGS[name]}
        result[name] = []
        for in_shards in (False, True):
            with device, init(**fields, enabled=in_shards):
                model = make()
            with torch._C.DisableTorchFunctionSubclass():  # no read
                held = sum(p.untyped_storage().nbytes() for p in model.parameters())
            engine = wrap(model, **fields)
            for seed in range(3):
                with engine.trace(folder / f"{name}, {seed}.json"):
                    engine.backward(engine(batch(seed, rank).to(device)).float().pow(2).mean())
                    engine.step()
            result[name].append([whole_bits(engine), held])
            engine.close()
    return result


def test_models_that_ranks_build_in_shards_on_their_devices_are_those_built_whole_and_each_rank_has_its_trace(
    tmp_path, drawn
):
    names = drawn(("stage 3", "streamed"), 1)
    first, second = on_devices(partial(built, names, tmp_path))
    for name, ((whole, held), (in_shards, nothing)) in first.items():
        assert whole == in_shards == second[name][0][0] == second[name][1][0]
        assert held > nothing == 0
        for rank in range(2):
            spans = read(tmp_path / f"{name}, 2.rank{rank}.json")
            assert {s["pid"] for s in spans} == {rank}
            updates = [s["args"]["bucket"] for s in spans if s["cat"] == UPDATE]
            arrived = [s["args"]["bucket"] for s in spans if s["cat"] == TO_HOST]
            assert sorted(arrived) == [*range(len(arrived))]
            assert sorted(updates) == sorted({*updates} & {*arrived}) != []  # a shard may be empty


def failing_on_the_way_back(rank):
    """A copy of parameters to the device fails on rank 1; both ranks catch what they are told, and go on."""
    if dist.get_backend() == "gloo":
        collectives.register()
    device = device_of(rank)
    reference = wrap(make(), lr=1e-2, reduce_bucket_size=1000)
    for seed in range(2):
        reference.backward(reference(batch(seed, rank)).pow(2).mean())
        reference.step()
    result = {"expected": bits(reference.module), "seconds": seconds_of_its_own(device)}
    store = dist.group.WORLD.get_group_store()
    for name, last in (("stage 1", True), ("stage 2", False)):
        store.set(f"{name} {rank}", "here")
        store.wait([f"{name} {other}" for other in range(2)])  # one is done sooner with the case before
        group = dist.new_group(backend=dist.get_backend(), timeout=timedelta(seconds=1))
        engine = wrap(make().to(device), lr=1e-2, reduce_bucket_size=1000, process_group=group, **SETTINGS[name])
        said = []

        def tried(act, said=said):
            try:
                act()
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}".partition("\n")[0])
                while_it_fails(torch.accelerator.synchronize)
            else:
                said.append(None)

        def step(seed, engine=engine):
            engine.backward(engine(batch(seed, rank).to(device)).float().pow(2).mean())
            engine.step()

        step(0)
        engine.flush()
        engine.backward(engine(batch(1, rank).to(device)).float().pow(2).mean())
        engine.optimizer.core._pipeline.buckets.run(lambda: None)  # the gradients have left
        torch.accelerator.synchronize()
        simulated.fail_copy(rank * (len(engine.optimizer.core._pipeline.buckets.all) if last else 1))  # none on rank 0

        def update(engine=engine):
            engine.step()
            engine.flush()

        tried(update)
        simulated.fail_copy(0)
        tried(engine.zero_grad)
        for seed in (2, 3):
            tried(lambda seed=seed: step(seed))
        tried(engine.flush)
        tried(engine.optimizer.state.values)
        tried(engine.close)
        result[name] = [said, bits(engine.module)]
    return result


def seconds_of_its_own(device):
    """The timeout of the group that an engine makes for its gathers, beside one of seven seconds."""
    group = dist.new_group(backend=collectives.BACKEND, timeout=timedelta(seconds=7))
    engine = wrap(make().to(device), process_group=group, **SETTINGS["stage 3"])
    found = timeout_of(engine.optimizer.sharding._world._group()).total_seconds()
    engine.close()
    return found


def while_it_fails(act):
    for _ in range(16):
        try:
            return act()
        except RuntimeError:
            pass
    raise AssertionError("the device does not go on")


@pytest.mark.states_on_host
@pytest.mark.draws(1)
@pytest.mark.parametrize("group", ["gloo", collectives.BACKEND])
def test_a_copy_to_one_ranks_device_that_fails_ends_the_engines_of_all_within_the_groups_time(group):
    first, second = on_ranks(2, backend=group)(failing_on_the_way_back)
    expected = first.pop("expected")
    assert second.pop("expected") == expected
    assert first.pop("seconds") == second.pop("seconds") == 7.0
    for name, (said, _) in second.items():
        assert said[0] == "RuntimeError: simulated device: the copy failed, as asked", name
        assert said[1] is None  # zero_grad
        assert all(re.match("(Collective|State)Error", step) for step in said[2:4]), name
    for name, (said, _) in first.items():
        assert said[0] is None or re.match("(Collective|Runtime)Error", said[0]), name
        assert all(re.match("(Collective|State)Error", step) for step in said[2:4]), name
    if group == "gloo":  # the last bucket was there, on this rank: the step is whole
        assert first["stage 1"][0][0] is None
        assert first["stage 1"][1] == expected != second["stage 1"][1]
        for said, _ in second.values():
            assert said[2].startswith("StateError: the last update broke off on this rank alone (simulated device: the")
            assert said[5] is None  # its states can be read


def without_waits(rank):
    """An exchange that the stream of copies does not wait for."""
    change = Change(collectives.__name__, "_Exchange.wait", "torch.accelerator.current_stream(self._device).wait_event(self._ended)", "None")  # fmt: skip # noqa: E501
    device = device_of(rank)
    with made(change):
        return train(device, rank)[:1], train("cpu", rank)[:1]


@pytest.mark.slow
def test_an_exchange_that_is_not_waited_for_shows():
    for lost, expected in on_devices(without_waits):
        assert lost != expected


RANKS = "frontends.torch.ranks.device_ranks"
UNNOTICED = {
    f"{RANKS}._Compared.order: self._event.order()": "the host alone waits for gradients that arrive",
    f"{RANKS}.DeviceRanks._publish: copies of lane.event((copies, mine))": "the model has them, and readers wait",
    f"{RANKS}.DeviceRanks._publish: mine of lane.event((copies, mine))": "the queue gets on only after it",
    f"{RANKS}.DeviceRanks._gather: whole of lane.event(whole)": "its storage is freed after what waited for it",
}
"""Of what orders an exchange between devices, what no scenario misses, and why."""


def test_no_mutant_was_dropped():
    mutants = by_name(mutants_of(RANKS))
    assert len(mutants) == 9, DROPPED
    assert UNNOTICED.keys() <= mutants.keys()


def in_turn(device, rank, ahead, **fields):
    """As :func:`train`, alike in every run; and the number of copies that the host waited for."""
    offload_core.support.worker.TaskThread = Threads()
    with simulated.in_turn(ahead=ahead):
        engine = wrap(make().to(device), lr=1e-2, reduce_bucket_size=1000, **fields)
        inputs, norms = [batch(seed, rank).to(device) for seed in range(3)], []
        before = simulated.copies_waited_for()
        for x in inputs:
            engine.backward(engine(x).float().pow(2).mean())
            norms.append(engine.step().grad_norm)
        waited = simulated.copies_waited_for() - before
        engine.flush()
        found = [whole_bits(engine), norms, waited]
        engine.close()
    return found


def mutants(rank):
    """The scenario that notices each mutant of the exchange between devices; None: none does."""
    device = device_of(rank)
    played = {
        f"{name}{', computing ahead' * ahead}": partial(in_turn, device, rank, ahead, **SETTINGS[name])
        for ahead in (False, True)
        for name in ("stage 1", "delayed", "streamed", "on the device")
    }
    sound = {name: play() for name, play in played.items()}
    result = {"sound": [sound[name] == play() for name, play in played.items()]}
    for name, mutant in by_name(mutants_of(RANKS)).items():
        with made(mutant):
            result[name] = next((by for by in played if played[by]() != sound[by]), None)
    return result


@pytest.mark.slow
def test_every_wait_of_an_exchange_between_devices_that_is_taken_out_is_noticed():
    first, second = on_devices(mutants)
    assert all(first.pop("sound") + second.pop("sound"))
    assert first == second
    assert {mutant for mutant, by in first.items() if by is None} == {*UNNOTICED}


def beside_the_program(rank):
    """The program reduces over the same ranks right after each step, while parameters are on their way."""
    device, found = device_of(rank), []
    engine = wrap(make().to(device), lr=1e-2, reduce_bucket_size=500)
    for seed in range(6):
        with simulated.delays(seed=seed, kernel=200 * rank, copy=3000 * (1 - rank)):
            engine.backward(engine(batch(seed, rank).to(device)).float().pow(2).mean())
            engine.step()
            for n in range(4):
                total = torch.full((1000,), float(rank + n), device=device)
                dist.all_reduce(total)
                found.append(total.cpu().unique().tolist())
    bits = whole_bits(engine)
    engine.close()
    return bits, found


def test_what_a_program_reduces_does_not_mix_with_parameters_on_their_way():
    first, second = on_ranks(2, backend=collectives.BACKEND, seconds=60)(beside_the_program)
    assert first == second
    assert first[1] == [[1.0 + 2 * n] for _ in range(6) for n in range(4)]
