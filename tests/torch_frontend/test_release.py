"""``release()`` and ``restore()``: nothing of an engine stays on the device, and every bit comes back."""

import gc
import signal
import weakref

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from frontends.torch import OffloadedAdamW, gathered_parameters, wrap
from frontends.torch.params.managed import AWAITED
from offload_core import DeviceMemoryError, HostMemoryError, ParameterError, StateError
from tests.support import killed_released, simulated
from tests.support.device_memory import allocated, allocated_before
from tests.support.interrupts import handled_at_each_line
from tests.support.phases import STREAMED, drained, mixed, train, x_of
from tests.support.processes import forked, torch_server
from tests.support.torch_models import assert_all_same, everything, loss_of, make, same_bits, step

SETTINGS = {
    "stage 1": {"stage": 1},
    "serial": {"schedule": "serial", "reduce_bucket_size": 700},
    "bfloat16": {"param_dtype": "bfloat16", "gradient_clipping": 0.05},
    "bfloat16 masters": {"param_dtype": "bfloat16", "master_dtype": "bfloat16"},
    "8 bits": {"param_dtype": "bfloat16", "state_format": "8bit"},
    "early": {"update_in_backward": True, "param_dtype": "bfloat16"},
    "accumulation": {"gradient_accumulation_steps": 2},
    "pageable": {"pin_memory": False},
    "muon": {"optimizer": "muon"},
    "streamed": STREAMED,
    "streamed, bfloat16": {**STREAMED, "param_dtype": "bfloat16", "schedule": "serial"},
}
LONG = ("stage 1", "streamed")
ON_DEVICE = ["simulated, delays 0"]
EVERYWHERE = ["host", *ON_DEVICE, "simulated, delays 1"]


def tensors_of(engine):
    """Copies of the module's tensors, on the host."""
    with gathered_parameters(engine.module.parameters()):
        return [t.detach().cpu().clone() for t in engine.module.state_dict().values()]


def in_phases(engine, seeds, *, every=1):
    """Train with a release after each step, or each ``every`` ones."""
    losses = []
    for i, seed in enumerate(seeds):
        losses += train(engine, [seed])
        if i % every == every - 1:
            engine.release()
            assert engine.is_released
            engine.restore()
    return losses


@pytest.mark.draws(4)
@pytest.mark.quick
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_bit_is_as_if_nothing_had_been_released(name, device):
    fields = SETTINGS[name]
    straight, engine = wrap(mixed(), lr=1e-2, **fields), wrap(mixed(), lr=1e-2, **fields)
    every = fields.get("gradient_accumulation_steps", 1)
    assert in_phases(engine, range(6), every=every) == train(straight, range(6))
    assert_all_same(everything(engine), everything(straight))
    for one, other in zip(engine.module.buffers(), straight.module.buffers(), strict=True):
        assert same_bits(one, other)
    for each in (engine, straight):
        each.close()


@pytest.mark.draws(2)
@pytest.mark.quick
@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
@pytest.mark.parametrize(
    ("name", "rounds"),
    [*((name, 20 if name in LONG else 5) for name in SETTINGS),
     *(pytest.param(name, 200, marks=pytest.mark.slow) for name in LONG)],
)  # fmt: skip
def test_the_device_holds_nothing_of_the_engine_in_any_round(name, rounds, device):
    before = allocated_before()
    engine = wrap(mixed(), lr=1e-2, **SETTINGS[name])
    with_model, host = None, set()
    for n in range(rounds):
        train(engine, range(2))
        report = engine.release()
        assert allocated() == before
        assert engine.memory_report().device_bytes == 0
        assert report.allocated is not None
        assert report.allocated[1] == before
        host.add(engine.memory_report().host_bytes)
        engine.restore()
        engine.flush()  # else buckets may be on their way
        with_model = with_model or allocated()
        assert allocated() == with_model > before, n
    assert len(host) == 1
    engine.close()


@pytest.mark.states_on_host
@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_only_values_without_master_weights_are_copied_and_none_is_moved_twice(device):
    engine = wrap(mixed(), lr=1e-2, param_dtype="bfloat16")
    train(engine, range(2))
    trained = {p.untyped_storage()._cdata: p.nbytes for p in engine.module.parameters() if p.requires_grad}
    rest = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in [*engine.module.parameters(), *engine.module.buffers()]
    }
    report = engine.release()
    assert report.released == sum(rest.values())
    assert report.copied == sum(rest.values()) - sum(trained.values())
    assert engine.memory_report().host["released values"] - report.copied < 64 * len(rest)
    assert "copied to the host" in str(report)


@pytest.mark.draws(2)
@pytest.mark.parametrize("device", EVERYWHERE[:2], indirect=True)
@pytest.mark.parametrize("fields", [{}, {"param_dtype": "bfloat16"}, STREAMED], ids=str)
def test_saves_exports_and_reads_of_states_find_a_released_model_as_it_was(fields, device, tmp_path):
    engine = wrap(mixed(), lr=1e-2, **fields)
    train(engine, range(2))
    weight, found = engine.module.first.weight, []
    for name in ("before", "released"):
        if name == "released":
            engine.release()
        engine.save_checkpoint(tmp_path / name, wait=name == "before")
        engine.wait_for_checkpoint()
        engine.export_safetensors(tmp_path / f"{name} as they are")
        engine.export_safetensors(tmp_path / f"{name} in fp32", dtype="float32")
        states = [engine.optimizer.state[weight]["exp_avg"], *engine.optimizer.whole_states(weight).values()]
        states += [value for state in engine.optimizer.torch_state_dict()["state"].values() for value in state.values()]
        found.append([torch.as_tensor(value).clone() for value in states])
        engine.flush()
    assert_all_same(*found)
    for what in ("as they are", "in fp32"):
        one, other = (next((tmp_path / f"{n} {what}").glob("*.safetensors")) for n in ("before", "released"))
        assert one.read_bytes() == other.read_bytes()
    engine.restore()
    expected = everything(engine)
    engine.close()
    for name in ("before", "released"):
        resumed = wrap(mixed(), lr=1e-2, **fields)
        resumed.load_checkpoint(tmp_path / name)
        assert_all_same(everything(resumed), expected)
        resumed.close()


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_what_is_named_stays_on_the_device(device):
    engine = wrap(mixed(), lr=1e-2)
    train(engine, range(2))
    module, before = engine.module, everything(engine)
    with pytest.raises(ParameterError, match=r"release\(keep=\.\.\.\): nothing is named 'nothing'; expected names"):
        engine.release(keep=["frozen", "nothing"])
    assert not engine.is_released
    nothing = allocated_before()
    with engine.released(keep=["frozen", "norm.running_mean", "first.bias"]) as report:
        kept = [module.frozen.weight, module.frozen.bias, module.norm.running_mean, module.first.bias]
        assert all(t.untyped_storage().nbytes() for t in kept)
        assert report.released <= nothing - allocated() < 1.2 * report.released  # each is rounded up
        module.frozen(torch.ones(1, 64, device=device)).sum().item()
        with pytest.raises(StateError, match="released"):
            module.norm.running_var.sum()
    assert_all_same(everything(engine), before)
    with engine.released(keep="frozen.weight"):
        assert module.frozen.weight.untyped_storage().nbytes()
    engine.close()


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
@pytest.mark.parametrize("fields", [{}, {"param_dtype": "bfloat16"}], ids=str)
def test_without_room_on_the_device_all_stays_released_and_nothing_is_lost(fields, device):
    engine = wrap(mixed(), lr=1e-2, **fields)
    train(engine, range(2))
    before = everything(engine)
    engine.release()
    nothing = allocated_before()
    for spare in (0, 2048, 12000):
        torch.accelerator.empty_cache()
        with (
            simulated.capacity(torch.accelerator.memory_reserved() + spare),
            pytest.raises(DeviceMemoryError, match="no room") as error,
        ):
            engine.restore()
        for words in ("trained parameters", "frozen parameters and buffers", "in all", "still released"):
            assert words in str(error.value)
        assert engine.is_released
        assert allocated() == nothing
    engine.restore()
    assert_all_same(everything(engine), before)
    engine.close()


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_without_room_on_the_host_nothing_is_released(device, monkeypatch):
    engine = wrap(mixed(), lr=1e-2)
    train(engine, range(2))
    before = everything(engine)

    def refused(label, *args, **options):
        raise HostMemoryError(f"{label}: refused")

    monkeypatch.setattr(engine.optimizer.core.memory, "allocate", refused)
    with pytest.raises(HostMemoryError, match="released values: refused"):
        engine.release()
    assert not engine.is_released
    assert_all_same(everything(engine), before)
    engine.close()


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_a_copy_to_the_host_that_fails_is_the_error_of_the_release_and_nothing_is_released(device):
    engine = wrap(mixed(), lr=1e-2)
    train(engine, range(2))
    before = everything(engine)
    torch.accelerator.synchronize()
    simulated.fail_copy(1)
    with pytest.raises(RuntimeError):
        engine.release()
    drained()
    assert not engine.is_released
    assert_all_same(everything(engine), before)
    with engine.released():
        pass
    assert_all_same(everything(engine), before)
    engine.close()


@pytest.mark.draws(2)
@pytest.mark.parametrize("device", EVERYWHERE[:2], indirect=True)
@pytest.mark.parametrize("fields", [{}, STREAMED, {"update_in_backward": True}], ids=str)
def test_a_release_waits_for_no_gradient_and_comes_in_no_backward(fields, device):
    engine, refused = wrap(make(), lr=1e-2, gradient_accumulation_steps=2, **fields), []
    waiting = r"release\(\) while gradients wait for an update; expected it between two updates"

    def release(gradient):
        with pytest.raises(StateError, match=r"release\(\) in the middle of a backward") as error:
            engine.release()
        refused.append(error)

    loss = loss_of(engine, 0)
    handle = engine.module[0].bias.register_hook(release)
    engine.backward(loss)
    handle.remove()
    assert len(refused) == 1
    with pytest.raises(StateError, match=waiting):
        engine.release()
    engine.step()
    with pytest.raises(StateError, match=waiting):  # the micro-step's, on the host
        engine.release()
    step(engine, 1)
    if fields.get("stage") == 3:
        with (
            gathered_parameters(engine.module.parameters()),
            pytest.raises(StateError, match=r"release\(\) inside gathered_parameters\(\)"),
        ):
            engine.release()
    engine.release()
    engine.release()  # again: nothing to do
    engine.restore()
    engine.restore()
    other = wrap(make(), lr=1e-2, gradient_accumulation_steps=2, **fields)
    for seed in range(2):
        step(other, seed)
    assert_all_same(everything(engine), everything(other))
    for each in (engine, other):
        each.close()


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_a_reader_waits_for_its_own_parameter_alone(device):
    engine = wrap(mixed(), lr=1e-2, param_dtype="bfloat16", reduce_bucket_size=4000)
    train(engine, range(2))
    module, pipeline = engine.module, engine.optimizer.core._pipeline
    expected = [t.detach().cpu().clone() for t in (module.frozen.weight, module.first.weight)]
    engine.release()
    stream = pipeline.device.memory._to_device
    with simulated.held(stream):
        engine.restore()  # does not wait
        found = [torch.empty_like(e, device=device) for e in expected]
        for values, param in zip(found, (module.frozen.weight, module.first.weight), strict=True):
            with torch.no_grad():
                values.copy_(param)  # nor does the host here: the device's own order has it wait
        assert not torch.accelerator.current_stream().query()
    for values, e in zip(found, expected, strict=True):
        assert same_bits(values, e)
    engine.close()


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_graphs_views_and_identities_survive(device):
    engine = wrap(mixed(), lr=1e-2)
    train(engine, range(2))
    module = engine.module
    ids, view = [id(p) for p in module.parameters()], module.first.weight.detach()[3:5]
    values = view.cpu().clone()
    loss = engine(x_of(5)).pow(2).mean()  # its graph has saved parameters
    engine.release()
    engine.restore()
    module.first.weight.sum().item()
    assert same_bits(view, values)
    assert [id(p) for p in module.parameters()] == ids
    assert module.again.weight is module.tied.weight
    assert module.part.untyped_storage()._cdata == module.shift.untyped_storage()._cdata
    engine.backward(loss)
    engine.step()
    other = wrap(mixed(), lr=1e-2)
    train(other, [0, 1, 5])
    assert_all_same(everything(engine), everything(other))
    for each in (engine, other):
        each.close()


@pytest.mark.draws(1)
@pytest.mark.parametrize("device", EVERYWHERE[:2], indirect=True)
def test_writes_from_outside_before_a_release_are_kept(device):
    found = []
    for releases in (True, False):
        engine = wrap(mixed(), lr=1e-2, param_dtype="bfloat16")
        train(engine, range(2))
        with torch.no_grad():
            engine.module.first.weight.mul_(0.5)
            engine.module.frozen.weight.data.add_(1)
            engine.module.last.bias.data = torch.ones_like(engine.module.last.bias.data)
            engine.module.norm.running_mean.zero_()
        if releases:
            engine.release()
            engine.restore()
        train(engine, range(2, 4))
        found.append([*everything(engine), *(b.cpu() for b in engine.module.buffers())])
        engine.close()
    assert_all_same(*found)


@pytest.mark.states_on_host
@pytest.mark.draws(1)
@pytest.mark.parametrize("device", EVERYWHERE[:2], indirect=True)
@pytest.mark.parametrize("early_copy", [False, True])
def test_an_optimizer_alone_releases_what_it_trains(early_copy, device):
    found = []
    for releases in (True, False):
        model = mixed()
        optimizer = OffloadedAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, early_copy=early_copy)
        for seed in range(4):
            optimizer.zero_grad()
            model(x_of(seed)).pow(2).mean().backward()
            optimizer.step()
            if releases:
                before = allocated_before() if device != "cpu" else 0
                report = optimizer.release()
                assert optimizer.is_released
                with pytest.raises(StateError, match="released parameters"):
                    model.first.weight.sum()
                model.frozen(torch.ones(1, 64, device=device))
                if device != "cpu":
                    assert 0 < report.released <= before - allocated() < 1.1 * report.released  # each is rounded up
                    assert not report.copied
                optimizer.restore()
        found.append([p.detach().cpu().clone() for p in model.parameters()])
        optimizer.close()
    assert_all_same(*found)


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
@pytest.mark.parametrize("fields", [{}, STREAMED], ids=str)
def test_a_close_restores_first(fields, device):
    engine = wrap(mixed(), lr=1e-2, **fields)
    train(engine, range(2))
    expected = tensors_of(engine)
    module = engine.module
    engine.release()
    engine.close()
    assert_all_same([t.detach() for t in module.state_dict().values()], expected)


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
@pytest.mark.parametrize("fields", [{}, STREAMED], ids=str)
def test_a_model_whose_engine_is_gone_stays_released_and_says_so(fields, device):
    engine = wrap(mixed(), lr=1e-2, **fields)
    train(engine, range(2))
    module, gone = engine.module, weakref.ref(engine.optimizer.core._pipeline)
    engine.release()
    del engine
    gc.collect()
    assert gone() is None
    for read in (lambda: module.first.weight.sum(), lambda: module.norm.running_mean.sum(), lambda: module(x_of(0))):
        with pytest.raises(StateError, match="its engine is gone"):
            read()


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_a_later_engine_takes_a_released_model_over(device):
    engine = wrap(mixed(), lr=1e-2)
    train(engine, range(2))
    expected = tensors_of(engine)
    engine.release()
    other = wrap(engine.module, lr=1e-2)
    assert_all_same([t.detach() for t in other.module.state_dict().values()], expected)
    train(other, range(2))
    other.close()


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_a_tensor_whose_memory_cannot_be_given_back_is_named_and_may_stay(device, monkeypatch):
    engine = wrap(mixed(), lr=1e-2)
    module = engine.module
    of_others = module.frozen.weight.untyped_storage()._cdata
    monkeypatch.setattr(torch.UntypedStorage, "resizable", lambda storage: storage._cdata != of_others)
    with pytest.raises(ParameterError, match=r"release\(\): 'frozen\.weight' is .*keep=\['frozen\.weight'\]"):
        engine.release()
    assert not engine.is_released
    with engine.released(keep=["frozen.weight"]):
        assert engine.memory_report().device_bytes == module.frozen.weight.nbytes
    train(engine, range(1))
    engine.close()


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_a_handler_that_reads_at_any_line_of_release_and_restore_gets_the_values_or_an_error(device):
    """Also where the main thread passes by torch's functions, and while another thread gives memory back."""
    engine = wrap(nn.Sequential(nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device)), lr=1e-2)
    engine.module[1].requires_grad_(False)
    engine.backward(engine(torch.ones(1, 4, device=device)).sum())
    engine.step()
    params = [engine.module[0].weight, engine.module[1].bias]
    expected, refused = [param.detach().clone() for param in params], set()

    def read(place):
        for param, values in zip(params, expected, strict=True):
            try:
                assert torch.equal(param, values), place
            except StateError:
                refused.add(place)

    def act():
        engine.release()
        engine.restore()
        engine.flush()

    handled_at_each_line(act, read)
    assert refused
    assert all(map(torch.equal, params, expected))
    engine.close()


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_what_frozen_wrappers_hold_leaves_also_where_several_hold_one_tensor(device):
    first, second, shared = (torch.randn(32, 32, device=device) for _ in range(3))
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)).to(device)
    module[0].weight = nn.Parameter(TwoTensor(first, shared), requires_grad=False)
    module[1].weight = nn.Parameter(TwoTensor(second, shared), requires_grad=False)
    before = [tensor.cpu() for tensor in (first, second, shared)]
    engine = wrap(module, lr=1e-2)
    for _ in range(2):
        engine.release()
        assert [tensor.untyped_storage().nbytes() for tensor in (first, second, shared)] == [0, 0, 0]
        with pytest.raises(StateError, match="restore"):
            module[1].weight.sum()
        engine.restore()
        assert all(map(same_bits, (first, second, shared), before))
    engine.release(keep=["1.weight"])
    assert first.untyped_storage().nbytes() == 0
    assert all(map(same_bits, (second, shared), before[1:]))
    engine.close()


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_between_release_and_restore_resumes_from_its_last_checkpoint(kills, tmp_path):
    simulated.prepare()
    expected = forked(lambda: killed_released.states(3 * kills + 1))
    for seed in range(kills):
        job = {"call": ["tests.support.killed_released", "run", {"folder": str(tmp_path), "seed": seed}]}
        [(status, *output)] = torch_server().run_all([job])
        assert status == -signal.SIGKILL, output
        done, bits = (tmp_path / f"{seed}.resumed").read_text().split()
        assert (int(done), bits) == (3 * seed, expected[3 * seed])


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_copies_that_are_still_read_on_the_host_are_not_replaced(device):
    """A second release needs more memory there than the first one, whose values are on their way back."""
    engine = wrap(mixed(), lr=1e-2)
    train(engine, range(2))
    before = everything(engine)
    device_memory = engine.optimizer.components.device_memory
    replace, arrived = device_memory._host_for, []

    def host_for(copied):
        arrived.append(all(memory.arrived.done() for memory in device_memory._memories.values()))
        replace(copied)

    device_memory._host_for = host_for
    with simulated.delays(copy=50_000, kernel=1):
        for keep in (["frozen"], []):
            engine.release(keep=keep)
            engine.restore()
    assert arrived == [True, True]
    assert_all_same(everything(engine), before)
    engine.close()


@pytest.mark.draws(1)
@pytest.mark.parametrize("device", EVERYWHERE[:2], indirect=True)
def test_a_kept_parameter_may_be_read_and_written_and_the_write_is_trained_on(device):
    found = []
    for releases in (True, False):
        engine = wrap(mixed(), lr=1e-2, param_dtype="bfloat16")
        train(engine, range(2))
        if releases:
            engine.release(keep=["first"])
        with torch.no_grad():
            engine.module.first.weight.mul_(0.5)
        masters = dict(engine.named_weights(dtype="float32"))["first.weight"]
        if releases:
            engine.restore()
        train(engine, range(2, 4))
        found.append([masters, *everything(engine)])
        engine.close()
    assert_all_same(*found)


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_a_tied_weight_stays_under_each_of_its_names(device):
    engine = wrap(mixed(), lr=1e-2)
    for keep in ("tied", "again.weight"):
        with engine.released(keep=keep):
            assert engine.module.tied.weight.untyped_storage().nbytes()
    engine.close()


@pytest.mark.parametrize("device", EVERYWHERE[:2], indirect=True)
def test_released_restores_if_it_has_released_and_also_where_the_release_was_interrupted_at_its_end(
    device, monkeypatch
):
    engine = wrap(mixed(), lr=1e-2)
    with engine.released():
        with engine.released():
            pass
        assert engine.is_released
    assert not engine.is_released
    release = engine.optimizer.release_tensors

    def interrupted(*args):
        release(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.optimizer, "release_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt), engine.released():
        pass
    assert not engine.is_released
    engine.close()


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_the_graph_of_a_forward_before_the_release_reads_what_has_come_back(device):
    found = []
    for releases in (False, True):
        engine = wrap(mixed(), lr=1e-2)
        train(engine, range(2))
        engine.flush()
        loss = engine(x_of(2)).pow(2).mean()
        with simulated.delays(copy=100_000, kernel=1):
            if releases:
                engine.release()
                engine.restore()
            engine.backward(loss)
        engine.step()
        found.append(everything(engine))
        engine.close()
    assert_all_same(*found)


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
def test_nothing_that_came_back_is_kept_alive_once_the_model_has_dropped_it(device):
    engine = wrap(mixed(), lr=1e-2)
    engine.release()
    engine.restore()
    train(engine, range(1))
    torch.accelerator.synchronize()
    train(engine, range(1))
    dropped = weakref.ref(engine.module.norm.running_var)
    engine.module.norm.running_var = torch.ones(64, device=device)
    gc.collect()
    assert dropped() is None
    engine.close()


@pytest.mark.parametrize("device", ON_DEVICE, indirect=True)
@pytest.mark.parametrize("restores", [False, True])
def test_a_deleted_model_leaves_no_function_that_waits(restores, device):
    gc.collect()
    before = {*AWAITED}
    engine = wrap(mixed(), lr=1e-2)
    train(engine, range(1))
    engine.release()
    if restores:
        engine.restore()
    del engine
    gc.collect()
    assert before == AWAITED
