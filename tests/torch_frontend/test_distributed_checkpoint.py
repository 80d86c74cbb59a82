"""``torch.distributed.checkpoint`` (DCP) of stages 1 to 3, of FSDP2 and tensor parallelism: each saves for each."""

import os
import pickle
import shutil
import signal
from contextlib import nullcontext

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from frontends.torch import OffloadedAdamW, gathered_parameters, wrap
from offload_core.errors import StateError
from tests.support.processes import on_ranks
from tests.support.torch_rank import said_by

STEPS, SAVED = 30, 10
SHAPES = {"first": [(12, 10), (33,)], "second": [(7, 5), (3, 2, 2, 2), (20, 6)]}
STAGES = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, "param_persistence_threshold": 40},
    "8-bit": {"stage": 2, "state_format": "8bit"},
}
ENGINES = ("stage 1", "stage 2", "stage 3")
MESHES = ("fsdp", "fsdp x tp")


class Pulled(nn.Module):
    """Its loss pulls each parameter by a gradient that follows from the step alone: the same bits on every mesh.

    The gradients are multiples of 1/16, and sums of four and their averages are exact.
    """

    def __init__(self, shapes, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.params = nn.ParameterList(nn.Parameter(_values(shape, generator)) for shape in shapes)
        self.seed = seed

    def forward(self, step):
        generator = torch.Generator().manual_seed(1000 * step + self.seed)
        total = 0.0
        for param in self.params:
            gradient = torch.randint(-16, 16, param.shape, generator=generator).to(param.dtype) / 16
            if isinstance(param, DTensor):
                gradient = DTensor.from_local(gradient, param.device_mesh, [Replicate()] * param.device_mesh.ndim)
            pulled = (param * gradient).sum()
            total = total + (pulled.full_tensor() if isinstance(pulled, DTensor) else pulled)
        return total


def _values(shape, generator):
    """Of bfloat16, so that fp32 master weights begin alike wherever the model is cast."""
    return torch.randn(shape, generator=generator).bfloat16().float()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({name: Pulled(shapes, i) for i, (name, shapes) in enumerate(SHAPES.items())})

    def forward(self, step):
        return sum(block(step) for block in self.blocks.values())


def freeze(model):
    """One part of it is not trained: its parameters, and a buffer."""
    model.blocks["second"].requires_grad_(False)
    model.register_buffer("seen", torch.arange(6.0).view(2, 3))


def sharded(kind, dtype, *, frozen=False):
    model, world = Net().to(dtype), dist.get_world_size()
    if frozen:
        freeze(model)
    if kind == "fsdp x tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks.values():
            for i, param in enumerate([*block.params]):
                cut = Shard(1 if param.dim() == 2 and i % 2 == 0 else 0)
                placed = distribute_tensor(param.detach(), mesh["tp"], [cut])
                block.params[i] = nn.Parameter(placed, requires_grad=param.requires_grad)
        mesh = mesh["dp"]
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for block in (*model.blocks.values(), model):
        fully_shard(block, mesh=mesh)
    return model


class Run:
    """A model that trains in one of these ways, in as many ranks as there are."""

    def __init__(self, kind, dtype=torch.float32, **fields):
        self.kind, self.engine = kind, None
        if kind in STAGES:
            self.model = Net()
            for block in self.model.blocks.values():
                for param in block.params:
                    if param.dim() == 4:  # of another order in memory
                        param.data = param.data.contiguous(memory_format=torch.channels_last)
            name = str(dtype).removeprefix("torch.")
            fields = {**STAGES[kind], "param_dtype": name, "reduce_bucket_size": 64, **fields}
            self.engine = wrap(self.model, lr=1e-2, **fields)
            self.optimizer = self.engine.optimizer
        else:
            self.model = (
                Net().to(dtype)
                if kind in ("alone", "torch alone")
                else sharded(kind.split()[-1] if kind == "torch fsdp" else kind, dtype)
            )
            if kind.startswith("torch"):
                self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
            else:
                self.optimizer = OffloadedAdamW(self.model.parameters(), lr=1e-2, **fields)

    def train(self, steps):
        for step in steps:
            if self.engine is not None:
                self.engine.backward(self.engine(step))
                self.engine.step()
            else:
                self.model(step).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def whole(self, **how):
        """A context in which the parameters may be read."""
        return gathered_parameters(self.model.parameters(), **how) if self.kind == "stage 3" else nullcontext()

    def states(self):
        return get_state_dict(self.model, self.optimizer)

    def save(self, folder):
        with self.whole():
            model, optimizer = self.states()
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder):
        with self.whole(modifier_rank=0):
            model, optimizer = self.states()
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return self

    def bits(self):
        """Of all parameters and states, whole. Master weights that are the parameters are no states elsewhere."""
        found = {}
        with self.whole():
            for name, param in self.model.named_parameters():
                found[name] = _bits(_whole(param.detach()))
        for name, param in self.model.named_parameters():
            if isinstance(self.optimizer, torch.optim.AdamW):
                states = {key: _whole(value) for key, value in self.optimizer.state[param].items()}
            else:
                states = self.optimizer.whole_states(param) | {"step": self.optimizer.state[param]["step"]}
            found |= {f"{key} of {name}": _bits(value) for key, value in states.items()}
        return found


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _bits(tensor):
    return tensor.detach().float().contiguous().numpy().tobytes()


def differing(found, expected):
    """The entries that both have, and that differ."""
    assert len(found.keys() & expected.keys()) >= 4 * len(list(Net().parameters()))
    return [name for name in found.keys() & expected.keys() if found[name] != expected[name]]


def straight(steps, dtype):
    return Run("alone", dtype).train(range(steps)).bits()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_thirty_steps_are_ten_saved_by_four_ranks_and_twenty_by_four_two_or_one(dtype, tmp_path):
    """Saved by our stages and by FSDP2 with tensor parallelism; loaded by these and by torch's own AdamW, and back."""
    torchs = [] if dtype is torch.bfloat16 else ["torch fsdp"]  # it has no master weights

    @on_ranks(4)
    def _(rank):
        for kind in (*ENGINES, *MESHES):
            Run(kind, dtype).train(range(SAVED)).save(tmp_path / kind)
        for kind in torchs:
            assert not differing(Run(kind, dtype).load(tmp_path / "stage 2").bits(), straight(SAVED, dtype))
            Run(kind, dtype).load(tmp_path / "stage 2").save(tmp_path / kind)

    for world_size in (4, 2, 1):

        @on_ranks(world_size)
        def _(rank, world_size=world_size):
            expected = straight(STEPS, dtype)
            for i, saver in enumerate((*ENGINES, *MESHES, *torchs)):
                loaders = [*ENGINES, "fsdp"] if world_size == 4 or i == 0 else [ENGINES[i % 3], "fsdp"]
                for kind in loaders if world_size > 1 else [*loaders, "alone"]:
                    run = Run(kind, dtype).train([7]).load(tmp_path / saver).train(range(SAVED, STEPS))
                    assert not differing(run.bits(), expected), (saver, kind)


class Killed(dcp.FileSystemWriter):
    """It is killed when its data are written, and no list of them is."""

    def write_data(self, plan, planner):
        super().write_data(plan, planner)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long("several trainings on two ranks or more")
def test_each_goes_on_from_what_another_has_saved(tmp_path, drawn):
    """In one start of processes; the law above has more of them."""
    pairs = drawn((("stage 2", "fsdp x tp"), ("fsdp x tp", "stage 3"), ("stage 3", "stage 1")), 1)

    @on_ranks(4)
    def _(rank):
        expected = straight(5, torch.bfloat16)
        for saver, loader in pairs:
            Run(saver, torch.bfloat16).train(range(3)).save(tmp_path / saver)
            run = Run(loader, torch.bfloat16).train([7]).load(tmp_path / saver).train(range(3, 5))
            assert not differing(run.bits(), expected), (saver, loader)


def test_a_killed_save_leaves_the_one_before(tmp_path):
    @on_ranks(2, killed=[0, 1])
    def _(rank):
        run = Run("stage 2", torch.bfloat16).train(range(SAVED))
        run.save(tmp_path / "1")
        dcp.save(
            {"optimizer": get_optimizer_state_dict(run.model, run.optimizer)}, storage_writer=Killed(tmp_path / "2")
        )

    @on_ranks(2)
    def _(rank):
        run = Run("fsdp", torch.bfloat16)
        with pytest.raises(CheckpointException, match="metadata is None"):
            run.load(tmp_path / "2")
        if rank == 0:
            shutil.copytree(tmp_path / "1", tmp_path / "damaged")
            os.truncate(max((tmp_path / "damaged").glob("*.distcp")), 1000)
        dist.barrier()
        with pytest.raises(CheckpointException):
            run.load(tmp_path / "damaged")
        assert not differing(run.load(tmp_path / "1").bits(), straight(SAVED, torch.bfloat16))


def test_states_that_are_encoded_and_copies_of_a_save_in_the_background(tmp_path, drawn):
    """DCP's two ways to copy what it saves; training goes on at once."""
    cases = drawn([(kind, folder) for kind in ("8-bit", "stage 2", "fsdp") for folder in ("1", "2")], 1)

    @on_ranks(2)
    def _(rank):
        group = dist.new_group()
        for kind, folder in cases:
            run = Run(kind, torch.bfloat16).train(range(3))
            path = tmp_path / kind / folder
            how = {"checkpoint_id": path} if folder == "1" else {"storage_writer": dcp.FileSystemWriter(path)}
            expected, state = run.bits(), dict(zip(("model", "optimizer"), run.states(), strict=True))
            running = dcp.async_save(state, process_group=group, **how)
            run.train([3])
            running.result()
            assert not differing(Run(kind, torch.bfloat16).load(path).bits(), expected), (kind, folder)


def test_master_weights_that_a_checkpoint_lacks_follow_the_parameters(tmp_path):
    @on_ranks(2)
    def _(rank):
        Run("torch fsdp").train(range(3)).save(tmp_path)
        for kind in ("stage 2", "fsdp"):
            run = Run(kind, torch.bfloat16).train([7])
            model, optimizer = run.states()
            planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path, planner=planner)
            set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            saved, found = Run("torch fsdp").load(tmp_path).bits(), run.bits()
            for name, _ in run.model.named_parameters():
                assert found[f"exp_avg of {name}"] == saved[f"exp_avg of {name}"]
                master, param = _rounded(found[f"master of {name}"]), _rounded(saved[name])
                assert master == param == found[name]  # elements that round to the parameter keep their low bits


def _rounded(bits):
    """To bfloat16."""
    return _bits(torch.frombuffer(bytearray(bits), dtype=torch.float32).bfloat16())


def test_states_that_are_encoded_on_one_process(tmp_path):
    @on_ranks(1)
    def _(rank):
        for kind, fields in (("8-bit", {}), ("fsdp", {"state_format": "8bit"})):
            run = Run(kind, torch.bfloat16, **fields).train(range(3))
            run.save(tmp_path / kind)
            other = Run(kind, torch.bfloat16, **fields).train([7]).load(tmp_path / kind)
            assert not differing(other.bits(), run.bits())


def test_whole_and_flat_state_dicts(tmp_path, drawn):
    """Gathered on rank 0 and sent from there, or in each rank; flat ones through DCP, between ours and torch's own."""
    receivers = drawn(("fsdp", "stage 2", "torch fsdp"), 1)
    ring = ("fsdp", "stage 1", "torch fsdp", "stage 3")
    pairs = drawn([*zip(ring, (*ring[1:], ring[0]), strict=True)], 1)

    @on_ranks(2)
    def _(rank):
        run = Run("fsdp").train(range(3))
        expected = run.bits()
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(run.model, run.optimizer, options=whole)
        assert bool(optimizer) is (rank == 0)
        sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        for kind in receivers:
            other = Run(kind).train([9])
            given = pickle.loads(pickle.dumps(optimizer))
            set_model_state_dict(other.model, dict(model), options=sent)
            set_optimizer_state_dict(other.model, other.optimizer, given, options=sent)
            assert not differing(other.bits(), expected), kind
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        for saver, loader in pairs:
            run, other = Run(saver).train(range(3)), Run(loader).train([9])
            dcp.save(get_optimizer_state_dict(run.model, run.optimizer, options=flat), checkpoint_id=tmp_path / saver)
            state = get_optimizer_state_dict(other.model, other.optimizer, options=flat)
            dcp.load(state, checkpoint_id=tmp_path / saver)
            set_optimizer_state_dict(other.model, other.optimizer, state, options=flat)
            found, expected = other.bits(), run.bits()
            states = [key for key in found if " of " in key and "master" not in key]
            assert len(states) == 15
            assert [key for key in states if found[key] != expected[key]] == [], loader


def test_the_next_step_uses_what_was_loaded_in_place(tmp_path, drawn):
    """Without a call of set_state_dict: the tensors of state dicts are the parameters and states themselves."""
    late = {"schedule": "delayed", "delay_warmup_steps": 1}
    cases = drawn([("fsdp", {}), ("stage 2", {}), ("fsdp", late)], 1)

    @on_ranks(2)
    def _(rank):
        for kind, fields in cases:
            run = Run(kind, torch.bfloat16, **fields).train(range(5))
            run.optimizer.flush()
            folder = tmp_path / f"{kind}{len(fields)}"
            run.save(folder)
            other = Run(kind, torch.bfloat16, **fields).train(range(8, 12))
            model, optimizer = get_state_dict(other.model, other.optimizer)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
            for each in (run, other):
                each.train([5, 6])
                each.optimizer.flush()
            assert not differing(other.bits(), run.bits())


def engine_of(kind):
    """An engine of a model of which one part is frozen."""
    if kind in STAGES:
        model = Net().to(torch.bfloat16)
        freeze(model)
        return wrap(model, lr=1e-2, reduce_bucket_size=64, **STAGES[kind])
    return wrap(sharded(kind, torch.bfloat16, frozen=True), lr=1e-2)


def train_engine(engine, steps):
    for step in steps:
        engine.backward(engine(step))
        engine.step()
    engine.flush()


def everything_of(engine):
    found = {}
    with gathered_parameters(engine.module.parameters()):
        for name, tensor in (*engine.module.named_parameters(), *engine.module.named_buffers()):
            found[name] = _bits(_whole(tensor.detach()))
    for slot in engine.optimizer.slots:
        found |= {f"{k} of {slot.name}": _bits(v) for k, v in engine.optimizer.whole_states(slot.param).items()}
    return found


@pytest.mark.slow
def test_our_own_checkpoints_go_from_meshes_to_one_process_and_back(tmp_path):
    """With frozen DTensors and a buffer, which those who load have otherwise; and exports are of whole tensors."""

    @on_ranks(4)
    def saved(rank):
        found = []
        for kind in ("fsdp x tp", "fsdp", "stage 3"):
            engine = engine_of(kind)
            with torch.no_grad(), gathered_parameters(engine.module.parameters(), modifier_rank=0):
                for param in engine.module.blocks["second"].params:
                    param.mul_(3)
                engine.module.seen.mul_(2)
            train_engine(engine, range(3))
            engine.save_checkpoint(tmp_path / kind)
            for dtype in (None, "float32"):
                engine.export_safetensors(tmp_path / kind / f"{dtype}", dtype=dtype)
            train_engine(engine, [3, 4])
            found.append(everything_of(engine))
        return found

    assert saved == [[saved[0][0]] * 3] * 4
    for world_size in (1, 2):

        @on_ranks(world_size)
        def loaded(rank, world_size=world_size):
            found = []
            for saver in ("fsdp x tp", "fsdp", "stage 3"):
                for kind in ("stage 2", "fsdp") if world_size == 1 else ("fsdp", "stage 3", "fsdp x tp"):
                    engine = engine_of(kind)
                    engine.load_checkpoint(tmp_path / saver)
                    train_engine(engine, [3, 4])
                    found.append(everything_of(engine))
            return found

        assert {tuple(bits.items()) for of_one in loaded for bits in of_one} == {tuple(saved[0][0].items())}

    exported = {}
    for kind in ("fsdp x tp", "fsdp", "stage 3"):
        for dtype in ("None", "float32"):
            weights = safetensors.torch.load_file(tmp_path / kind / dtype / "model.safetensors")
            assert {name: tuple(t.shape) for name, t in weights.items()} == {
                **{name: tuple(p.shape) for name, p in Net().named_parameters()},
                "seen": (2, 3),
            }
            bits = {name: _bits(value) for name, value in weights.items()}
            assert exported.setdefault(dtype, bits) == bits


def test_parameters_of_no_dimension_and_of_no_elements(tmp_path):
    """One rank has the single element, and the other one none; nobody has elements of the last."""

    def trained(steps):
        torch.manual_seed(0)
        params = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in ((), (40,), (0, 4)))
        engine = wrap(params, lr=1e-2, stage=2, param_dtype="bfloat16")
        for _ in range(steps):
            engine.backward(sum(param.float().exp().sum() for param in params))
            engine.step()
        return engine

    @on_ranks(2)
    def saved(rank):
        engine = trained(2)
        dcp.save(get_optimizer_state_dict(engine.module, engine.optimizer), checkpoint_id=tmp_path)
        return [_bits(engine.optimizer.whole_states(param)["exp_avg"]) for param in engine.module]

    for world_size in (2, 1):

        @on_ranks(world_size)
        def loaded(rank):
            engine = trained(1)
            state = get_optimizer_state_dict(engine.module, engine.optimizer)
            dcp.load(state, checkpoint_id=tmp_path)
            set_optimizer_state_dict(engine.module, engine.optimizer, state)
            return [_bits(engine.optimizer.whole_states(param)["exp_avg"]) for param in engine.module]

        assert loaded == [saved[0]] * world_size


def test_a_part_says_what_it_is():
    @on_ranks(2)
    def _(rank):
        run = Run("stage 2", torch.bfloat16, schedule="delayed", delay_warmup_steps=1).train(range(3))
        part = run.optimizer.state_dict()["state"][0]["exp_avg"]
        assert part.shape == run.model.blocks["first"].params[0].shape
        assert part.to("cpu") is part.cpu() is part
        assert "120" not in repr(part)  # it has some of them
        for use in (lambda: part + 1, lambda: part.zero_(), lambda: torch.zeros(12, 10).copy_(part), lambda: part[0]):
            assert said_by(use).startswith("StateError: aten.")
        with pytest.raises(StateError, match=r"pickling \(torch.save\) of optimizer states"):
            pickle.dumps(part)
        with pytest.raises(StateError, match="the last step's values of parameter .* are held back"):
            part.__create_write_items__("state", part)
        run.engine.flush()
        assert part.__create_write_items__("state", part)
        other = Run("stage 2", torch.bfloat16, reduce_bucket_size=96)
        before = other.bits()
        with pytest.raises(StateError, match="on a rank that has .* elements of a tensor of shape"):
            other.optimizer.load_state_dict(
                {**run.optimizer.state_dict(), "partition": other.optimizer.state_dict()["partition"]}
            )
        assert other.bits() == before
        run.optimizer.load_state_dict(run.optimizer.state_dict())


def test_an_engines_names_are_in_no_state_dict():
    """Unless they are the user's: torch's own AdamW of the same parameters has none."""
    model = Net()
    torchs = torch.optim.AdamW(Net().parameters(), fused=True).state_dict()["param_groups"]
    engine = wrap(model)
    assert engine.optimizer.state_dict()["param_groups"][0].keys() == torchs[0].keys()
    assert [slot.name for slot in engine.optimizer.slots] == [name for name, _ in model.named_parameters()]
    saved = engine.optimizer.state_dict()
    saved["param_groups"][0]["param_names"] = [*"abcde"]
    engine.optimizer.load_state_dict(saved)  # of an earlier version
    assert "param_names" not in engine.optimizer.param_groups[0]
    engine.close()
    users = wrap(model, params=[("mine", param) for param in model.parameters()])
    assert "param_names" in users.optimizer.state_dict()["param_groups"][0]
    users.close()
    part = wrap(model, params=[{"params": [model.blocks["first"].params[0]]}])
    part.optimizer.add_param_group({"params": [("x", model.blocks["first"].params[1])]})
    assert [slot.name for slot in part.optimizer.slots] == ["blocks.first.params.0", "x"]
    assert not any("param_names" in group for group in part.optimizer.param_groups)
