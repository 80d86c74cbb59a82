"""Tests on an accelerator: a CUDA device where there is one (bench/on_gpu.sh), the simulated one elsewhere."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from frontends.torch import OffloadedAdamW, deepspeed, gathered_parameters, init, wrap
from frontends.torch.ranks import pinning
from offload_core.support import topology
from tests.support import blocks, one_process_group, simulated
from tests.support.device_memory import allocated, allocated_before
from tests.support.simulated import collectives
from tests.support.torch_models import on as blocks_device

pytestmark = pytest.mark.gpu


def make(device, dtype=torch.float32):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)]
    return torch.nn.Sequential(*layers).to(dtype).to(device)


def record_gradients(model, into):
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: into.__setitem__(name, g.detach().cpu().clone()))


def same_bits(a, b):
    return torch.equal(a.detach().cpu().view(torch.uint8), b.detach().cpu().view(torch.uint8))


@pytest.mark.draws(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_clipping": 0.05},
        {"gradient_accumulation_steps": 2},
        {"reduce_bucket_size": 9999},
        {"pin_memory": False},
        {"pin_memory": "allocate"},
    ],
    ids=str,
)
def test_the_device_gets_the_bits_that_the_host_gets(dtype, fields, accelerator):
    """The same gradients, once from the GPU through pinned staging and once in place on the CPU."""
    grads: dict = {}
    gpu_model = make(accelerator)
    gpu = wrap(gpu_model, lr=1e-2, param_dtype=dtype, **fields)
    record_gradients(gpu_model, grads)
    cpu_model = make("cpu")
    cpu = wrap(cpu_model, lr=1e-2, param_dtype=dtype, **fields)
    for name, p in cpu_model.named_parameters():
        p.register_hook(lambda g, name=name: grads[name])
    for seed in range(10):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed))
        gpu.backward(gpu(x.to(accelerator)).float().pow(2).mean())
        cpu.backward(cpu(x).float().pow(2).mean())
        assert gpu.step() == cpu.step()
    for (name, p), q in zip(gpu_model.named_parameters(), cpu_model.parameters(), strict=True):
        assert p.device.type == accelerator
        assert same_bits(p, q), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert gpu.optimizer.state[p][key].device.type == "cpu"
            assert same_bits(gpu.optimizer.state[p][key], cpu.optimizer.state[q][key]), (name, key)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
def test_muons_matrices_are_computed_on_the_device_as_torch_does(accelerator):
    """The bits are those of either schedule. On a GPU torch's own element-wise kernels may round otherwise."""

    def small():  # Newton-Schulz multiplies matrices of bfloat16, which is slow on some processors
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64)).to(accelerator)

    def inputs(seed):
        return rows(seed, "cpu")[:, :64].to(accelerator)

    def trained(**fields):
        model = small()
        engine = wrap(model, optimizer="muon", lr=0.02, reduce_bucket_size=999, muon_params=["weight"], **fields)
        for seed in range(5):
            engine.backward(engine(inputs(seed)).pow(2).mean())
            engine.step()
        engine.flush()
        return [p.detach().cpu() for p in model.parameters()]

    reference = small()
    weights = [p for p in reference.parameters() if p.dim() == 2]
    optimizers = [
        torch.optim.Muon(weights, lr=0.02),
        torch.optim.AdamW([p for p in reference.parameters() if p.dim() == 1], lr=1e-3),
    ]
    for seed in range(5):
        reference(inputs(seed)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    overlapping, serial = trained(), trained(schedule="serial")
    for mine, other, torchs in zip(overlapping, serial, reference.parameters(), strict=True):
        assert same_bits(mine, other)
        torch.testing.assert_close(mine, torchs.detach().cpu(), atol=5e-3, rtol=0)


def test_staging_is_pinned_and_gradients_leave_the_device(accelerator):
    model = make(accelerator, torch.bfloat16)
    engine = wrap(model, gradient_clipping=1.0)
    parameters = allocated_before()
    engine.backward(engine(torch.randn(8, 256, device=accelerator, dtype=torch.bfloat16)).float().pow(2).mean())
    engine.optimizer.core._pipeline.buckets.run(lambda: None)  # the copies have ended
    assert allocated() <= parameters + 2**20
    [bucket] = engine.optimizer.core._pipeline.buckets.all
    assert torch.from_numpy(bucket.gradient.buffer.view().view("uint8")).is_pinned()
    engine.step()


LIVE = {"max_live_parameters": 300_000, "prefetch_bucket_size": 140_000}
STREAMED = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 1000}


def deep(layers, device):
    torch.manual_seed(0)
    sizes = [(256, 512), (512, 256)] * (layers // 2)
    return torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes)).to(device)


def rows(seed, device):
    return torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)).to(device)


DISK = {
    "offload_optimizer": "nvme",
    "offload_param": "nvme",
    "nvme_path": tempfile.gettempdir(),
    "nvme_host_bytes": 0,
    "reduce_bucket_size": 100_000,
}


@pytest.mark.draws(1)
@pytest.mark.parametrize(("layers", "steps"), [(12, 3), pytest.param(48, 6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fields", [{}, LIVE, {**LIVE, **DISK}], ids=["", "few live", "on disk"])
def test_parameters_that_stream_from_the_host_give_the_bits_of_resident_ones(fields, layers, steps, accelerator):
    options = {"lr": 1e-3, "param_dtype": "bfloat16", "gradient_clipping": 1.0}
    plain = wrap(deep(layers, accelerator), **options)
    parted = wrap(deep(layers, accelerator), **options, **{**STREAMED, **fields})
    for seed in range(steps):
        for engine in (plain, parted):
            engine.backward(engine(rows(seed, accelerator)).float().pow(2).mean())
            assert engine.step().updated
            engine.flush()
    with gathered_parameters(parted.module.parameters()):
        for p, q in zip(plain.parameters(), parted.parameters(), strict=True):
            assert same_bits(p, q)
    assert parted.optimizer.sharding.live.numel == 0
    parameters = parted.optimizer.sharding.parameters
    shard = next(iter(parameters.records.values())).shard.values
    on_its_way = (
        torch.from_numpy(parameters._tier._disk.ahead._free[0]) if fields.get("offload_param") == "nvme" else shard
    )
    assert on_its_way.is_pinned()
    plain.close()


@pytest.fixture
def late():
    with ExitStack() as undo:
        yield undo


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"update_in_backward": True}], ids=["", "updated in backward"])
def test_parameters_that_stream_and_their_gradients_take_no_more_memory_where_there_are_more(fields, accelerator, late):
    """However late the copies are: backward waits for those of gradients."""
    if accelerator == simulated.NAME:
        late.enter_context(simulated.delays(seed=0, kernel=0, copy=20_000))
    held = {}
    for layers in (12, 48):
        engine = wrap(deep(layers, accelerator), param_dtype="bfloat16", **STREAMED, **LIVE, **fields)
        before, peaks = allocated_before(), []
        for seed in range(6):
            torch.accelerator.reset_peak_memory_stats()
            engine.backward(engine(rows(seed, accelerator)).float().pow(2).mean())
            engine.step()
            engine.flush()
            peaks.append(torch.accelerator.max_memory_allocated() - before)
        held[layers] = max(peaks)
        engine.close()
    assert held[48] < 2 * held[12]  # activations of 48 layers of 8 rows


def test_the_optimizer_alone_reads_p_grad_on_the_device(accelerator):
    model = make(accelerator)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2)
    reference = make(accelerator)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    for seed in range(5):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)).to(accelerator)
        for m, o in ((model, optimizer), (reference, plain)):
            m(x).pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            o.step()
            o.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def test_a_parameter_changed_by_hand_on_the_device_is_followed(accelerator):
    model = make(accelerator, torch.bfloat16)
    engine = wrap(model, lr=1e-6)
    with torch.no_grad():
        model[0].weight[0] = 3.0
    engine.backward(engine(torch.randn(8, 256, device=accelerator, dtype=torch.bfloat16)).float().pow(2).mean())
    engine.step()
    torch.testing.assert_close(model[0].weight[0], torch.full_like(model[0].weight[0], 3.0))


def test_a_model_built_in_host_memory_is_the_one_built_on_the_device_and_takes_none_of_its_memory(accelerator):
    with torch.device(accelerator):
        torch.manual_seed(0)
        whole = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
        used = allocated_before()
        torch.accelerator.reset_peak_memory_stats()
        torch.manual_seed(0)
        with init(remote_device="cpu"):
            model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    layer = 4 * 1024 * 1024
    assert torch.accelerator.max_memory_allocated() - used < 4 * layer
    assert allocated() - used < layer
    engine = wrap(model, stage=3, offload_param="cpu")
    assert allocated() - used < layer
    with gathered_parameters(model.parameters()):
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert p.device.type == accelerator
            assert same_bits(p, q)
    engine.backward(engine(torch.ones(2, 1024, device=accelerator)).sum())
    assert engine.step().updated


@pytest.mark.draws(1)
@pytest.mark.parametrize(
    "fields",
    [
        {"gradient_clipping": 0.05},
        {"schedule": "delayed", "delay_warmup_steps": 2},
        {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0},
        {"stage": 3, "param_persistence_threshold": 0},
    ],
    ids=str,
)
def test_a_checkpoint_resumes_on_the_device_and_on_the_host(tmp_path, fields, accelerator):
    """With a frozen layer, a buffer and dropout, whose generator is the device's."""

    def new(device, seed):
        torch.manual_seed(seed)
        frozen = torch.nn.Linear(256, 256).requires_grad_(False)
        layers = [torch.nn.Linear(256, 256), torch.nn.Dropout(0.5), frozen, torch.nn.BatchNorm1d(256)]
        return wrap(torch.nn.Sequential(*layers).to(device), lr=1e-2, param_dtype="bfloat16", **fields)

    def train(engine, seeds):
        for seed in seeds:
            x = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)).to(accelerator)
            engine.backward(engine(x).float().pow(2).mean())
            engine.step()

    def everything(engine):
        with gathered_parameters(engine.module.parameters()):
            found = [t.detach().cpu().clone() for t in engine.module.state_dict().values()]
        states = engine.optimizer.state.values()  # fp32 parameters on the host are their own master weights
        return found + [state[key].clone() for state in states for key in ("step", "exp_avg", "exp_avg_sq")]

    straight, resumed, on_host = new(accelerator, 0), new(accelerator, 1), new("cpu", 2)
    train(straight, range(5))
    straight.save_checkpoint(tmp_path, wait=False)
    train(straight, range(5, 10))
    straight.wait_for_checkpoint()
    resumed.load_checkpoint(tmp_path)
    train(resumed, range(5, 10))
    for a, b in zip(everything(straight), everything(resumed), strict=True):
        assert same_bits(a.reshape(-1), b.reshape(-1))
    resumed.load_checkpoint(tmp_path)
    on_host.load_checkpoint(tmp_path, random_state=False)
    for a, b in zip(everything(resumed), everything(on_host), strict=True):
        assert same_bits(a.reshape(-1), b.reshape(-1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it takes CUDA")
def test_the_driver_gives_the_address_under_which_the_system_has_the_device():
    [driver] = pinning.drivers_of(torch.device("cuda"))
    for index in range(torch.cuda.device_count()):
        torch.zeros(1, device=f"cuda:{index}")
        properties, address = torch.cuda.get_device_properties(index), driver.pci_address(index)
        domain, bus, device = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
        assert address == f"{domain:04x}:{bus:02x}:{device:02x}.0"
        if Path("/sys/bus/pci/devices").exists():
            assert address in [found.address for found in topology.pci_devices()]
    assert driver.pci_address(torch.cuda.device_count()) is None


# --- FSDP2 -------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(accelerator):
    """A process group of this process, with the backend that moves the device's memory."""
    backend = "nccl"
    if accelerator == simulated.NAME:
        collectives.register()
        backend = collectives.BACKEND
    with one_process_group.alone(backend):
        yield


@pytest.mark.draws(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("fields", [{}, {"gradient_clipping": 0.05}, {"update_in_backward": True}], ids=str)
def test_under_fsdp2_the_bits_are_those_of_the_model_without_it_and_gradients_leave(fields, accelerator):
    fields = {"lr": 1e-2, "reduce_bucket_size": 100_000, **fields}
    plain, model = wrap(deep(6, accelerator), **fields), deep(6, accelerator)
    mesh = DeviceMesh(accelerator, [0])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    engine = wrap(model, **fields)
    for seed in range(6):
        for each in (plain, engine):
            each.backward(each(rows(seed, accelerator)).pow(2).mean())
        gradients = [param.grad for param in model.parameters()]
        assert all(type(gradient._local_tensor).__name__ == "TakenGradient" for gradient in gradients)
        assert plain.step() == engine.step()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert same_bits(p, q.to_local())
        assert engine.optimizer.state[q]["exp_avg"].to_local().device.type == "cpu"


@pytest.mark.parametrize(
    "fields", [{}, {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}], ids=str
)
def test_a_released_engine_holds_nothing_and_every_bit_comes_back(fields, accelerator):
    found = []
    for releases in (True, False):
        before = allocated_before()
        model = make(accelerator, torch.bfloat16)
        model[2].requires_grad_(False)
        model.register_buffer("shift", torch.arange(256.0, device=accelerator))
        engine = wrap(model, lr=1e-2, param_dtype="bfloat16", reduce_bucket_size=60_000, **fields)
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(8, 256, dtype=torch.bfloat16).to(accelerator)
            engine.backward(engine(x).float().pow(2).mean())
            engine.step()
            del x
            if releases:
                report = engine.release()
                assert allocated() == before
                assert report.released > 0
                weights = dict(engine.named_weights())
                engine.restore()
        with gathered_parameters(engine.module.parameters()):
            found.append([t.detach().cpu().clone() for t in engine.module.state_dict().values()])
        if releases:
            assert all(map(same_bits, weights.values(), found[0]))
        engine.close()
        del engine, model
    assert all(map(same_bits, *found))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_script_for_deepspeed_trains_on_the_device_where_gradients_are_changed(stage, accelerator, tmp_path):
    """The face moves the model to the device; what it reads there is what the engine alone trains with."""
    config = {
        "train_batch_size": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "zero_optimization": {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
    }
    model, other = make("cpu"), make(accelerator)
    engine, *_, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert engine.device.type == torch.device(accelerator).type
    assert {p.device.type for p in model.parameters()} == {torch.device(accelerator).type}
    plain = wrap(other, config | {"zero_optimization": {"stage": 1}})
    for seed in range(4):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)).to(accelerator)
        for each in (engine, plain):
            each.backward(each(x).pow(2).mean())
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            gradient = deepspeed.utils.safe_get_full_grad(mine)
            assert gradient.device.type == torch.device(accelerator).type
            assert same_bits(gradient, plain.optimizer.whole_gradient(its))
            deepspeed.utils.safe_set_full_grad(mine, 0.5 * gradient)
            plain.optimizer.load_gradient(its, 0.5 * gradient.cpu())
        engine.step()
        plain.step()
    assert scheduler.get_last_lr() == engine.get_lr() == pytest.approx([1e-2])
    engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    again = deepspeed.initialize(model=make("cpu"), config=config)[0]
    assert again.load_checkpoint(tmp_path)[1] == {"epoch": 1}
    for mine, its, loaded in zip(model.parameters(), other.parameters(), again.module.parameters(), strict=True):
        assert same_bits(deepspeed.utils.safe_get_full_fp32_param(mine), its)
        assert same_bits(deepspeed.utils.safe_get_full_fp32_param(loaded), its)


@pytest.mark.draws(1)
@pytest.mark.parametrize("where", [0, 1 << 24])
@pytest.mark.parametrize(
    "fields", [{}, {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}], ids=["whole", "stage 3"]
)
def test_micro_batches_that_pass_block_by_block_give_the_bits_of_the_loop(fields, where, accelerator):
    """Blocks' inputs wait on the device, or on the host; device memory is that of one micro-batch there."""
    settings = {"lr": 1e-2, "param_dtype": "bfloat16", "gradient_accumulation_steps": 4, **fields}
    with blocks_device(accelerator):
        loop = wrap(blocks.made(), **settings)
        engine = wrap(blocks.made(), layerwise=True, host_activation_memory=where, **settings)
        for step in range(5):
            losses, _ = blocks.loop(loop, blocks.batches(4, step))
            assert losses == blocks.by_blocks(engine, blocks.batches(4, step))[0]
        theirs = dict(loop.named_weights(dtype="float32"))
        assert all(same_bits(value, theirs[name]) for name, value in engine.named_weights(dtype="float32"))
