"""OffloadedAdamW in Hugging Face's Accelerate: prepare, accumulate, clip, save, GradScaler, as with torch's AdamW."""

import copy
import io
import shutil

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, move_to_device
from accelerate.state import PartialState
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from frontends.torch import OffloadedAdamW
from frontends.torch.integrations.accelerate import save_in_shards
from frontends.torch.integrations.shards import FOLDER
from offload_core.errors import CheckpointError, ConfigError, StateError
from tests.support.hugging_face import alone
from tests.support.processes import on_ranks
from tests.support.torch_models import assert_same, same_bits
from tests.support.torch_rank import bits, make

__all__ = ["alone"]  # a fixture

TOKENS = torch.randint(64, (12, 8), generator=torch.Generator().manual_seed(1))
CLIP = 0.25


def gpt2(dtype=torch.float32):
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16)).to(dtype)


def ours(params):
    return OffloadedAdamW(params, lr=1e-2, weight_decay=0.1)


def torchs(params):
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)
    optimizer._step_supports_amp_scaling = False  # else it skips by itself, and Accelerate steps the schedule
    return optimizer


class Run:
    """A model, an optimizer, a loader and a schedule, prepared, and the loop that Accelerate's documentation shows."""

    def __init__(self, new, *, accumulate=2, model=None, scaler=None):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        self.accelerator.scaler = scaler  # on a GPU mixed_precision="fp16" puts one there; on the CPU it does not
        self.accelerator.native_amp = scaler is not None
        model = gpt2() if model is None else model
        optimizer = new(model.parameters())
        schedule = LambdaLR(optimizer, lambda update: 1 / (1 + update))
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, DataLoader(TOKENS, batch_size=2), schedule
        )
        self.losses, self.norms, self.skipped = [], [], []

    def train(self, *, overflow_at=None):
        for i, tokens in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=tokens, labels=tokens).loss
                self.accelerator.backward(loss)
                if i == overflow_at:
                    next(self.model.parameters()).grad[0, 0] = torch.inf
                if self.accelerator.sync_gradients:
                    before = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                    after = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
                    self.norms.append((float(before), float(after)))
                self.optimizer.step()
                self.skipped.append(self.optimizer.step_was_skipped)
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))
        return self


def assert_same_run(one, other):
    assert one.losses == other.losses
    assert one.schedule.get_last_lr() == other.schedule.get_last_lr()
    assert_same(one.model, other.model, one.optimizer, other.optimizer)


def test_a_run_is_that_of_torchs_fused_adamw_and_clips_to_the_asked_norm():
    one, other = Run(ours).train(), Run(torchs).train()
    assert_same_run(one, other)
    assert one.norms == other.norms
    assert len(one.norms) == 3
    for before, after in one.norms:
        assert before > CLIP
        assert after == pytest.approx(CLIP, rel=1e-5)


def addresses_and_copies(optimizer):
    return [
        (value.data_ptr(), value.dtype, value.clone()) for state in optimizer.state.values() for value in state.values()
    ]


def test_preparing_neither_moves_nor_rounds_the_states(monkeypatch):
    """Accelerate moves all that state_dict() holds to the model's device, and loads it: of a device that holds no
    values nothing would come back."""
    model = gpt2(torch.bfloat16)
    optimizer = ours(model.parameters())
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    before = addresses_and_copies(optimizer)
    assert len(before) == 4 * len(list(model.parameters()))
    Accelerator(cpu=True)
    monkeypatch.setitem(PartialState._shared_state, "device", torch.device("meta"))
    prepared = AcceleratedOptimizer(optimizer, device_placement=True)
    assert str(prepared.accelerator_state.device) == "meta"
    for (address, dtype, value), now in zip(before, addresses_and_copies(optimizer), strict=True):
        assert (address, dtype) == now[:2]
        assert same_bits(value, now[2])
    torchs_own = torchs([torch.nn.Parameter(torch.zeros(16))])
    torchs_own.param_groups[0]["params"][0].grad = torch.ones(16)
    torchs_own.step()
    moved = move_to_device(torchs_own.state_dict(), torch.device("meta"))
    assert moved["state"][0]["exp_avg"].is_meta  # so this is what it does


def test_a_state_is_an_ordinary_tensor_in_all_else():
    optimizer = ours([torch.nn.Parameter(torch.ones(4, 4))])
    state = optimizer.state_dict()["state"][0]["exp_avg"]
    assert state.to("meta") is state
    assert state.to(torch.device("cpu"), non_blocking=True) is state
    assert state.to(torch.float64).dtype is torch.float64
    assert type(state + 1) is type(copy.deepcopy(state)) is type(state.to("cpu", copy=True)) is torch.Tensor
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["state"][0]["exp_avg"]) is torch.Tensor


def test_shards_are_loaded_whole_or_not_at_all(tmp_path):
    """On one process, too; and a folder that was saved before without shards is loaded as ever."""
    straight = Run(ours, model=gpt2(torch.bfloat16)).train()
    straight.accelerator.save_state(str(tmp_path / "without"))
    save_in_shards(straight.accelerator, straight.model, straight.optimizer)
    straight.accelerator.save_state(str(tmp_path / "shards"))
    files = {path.name: path.stat().st_size for path in (tmp_path / "shards").glob("optimizer.bin")}
    assert files["optimizer.bin"] < 2000
    expected = [value.clone() for state in straight.optimizer.state.values() for value in state.values()]
    for name in ("without", "shards"):
        resumed = Run(ours, model=gpt2(torch.bfloat16))
        save_in_shards(resumed.accelerator, resumed.model, resumed.optimizer)
        resumed.accelerator.load_state(str(tmp_path / name))
        found = [value for state in resumed.optimizer.state.values() for value in state.values()]
        assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
    plain = Run(ours, model=gpt2(torch.bfloat16))
    plain.accelerator.load_state(str(tmp_path / "shards"))
    with pytest.raises(StateError, match=r"in shards, in offload/ beside it, .* or save_in_shards\(\) before"):
        plain.train()
    plain.accelerator.load_state(str(tmp_path / "without"))
    plain.train()
    shutil.rmtree(tmp_path / "shards" / FOLDER)
    with pytest.raises(CheckpointError, match=r"the states are in offload/, which is not there; expected the folder"):
        resumed.accelerator.load_state(str(tmp_path / "shards"))


def test_only_a_prepared_optimizer_of_ours_is_saved_in_shards():
    run, other = Run(torchs), ours(gpt2().parameters())
    with pytest.raises(ConfigError, match=r"optimizer is AcceleratedOptimizer of AdamW, expected an Offload"):
        save_in_shards(run.accelerator, run.model, run.optimizer)
    with pytest.raises(ConfigError, match=r"the optimizer is OffloadedAdamW, expected an OffloadedAdamW as acceler"):
        save_in_shards(run.accelerator, run.model, other)


class OfRanks:
    """A model with a frozen part, and an optimizer over the ranks, prepared."""

    def __init__(self, seed):
        self.accelerator = Accelerator(cpu=True)
        model = make(seed).to(torch.bfloat16)
        model[0].requires_grad_(False)
        optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, process_group=dist.group.WORLD)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def train(self, seeds):
        for seed in seeds:
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * seed + dist.get_rank()))
            self.accelerator.backward(self.model(x.bfloat16()).float().pow(2).mean())
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_ranks_save_and_load_their_shards(tmp_path):
    """A run goes on as if it had not been interrupted, also with the master weights that bfloat16 rounds."""

    @on_ranks(2)
    def _(rank):
        straight, resumed = OfRanks(0), OfRanks(1)
        for run in (straight, resumed):
            save_in_shards(run.accelerator, run.model, run.optimizer)
        straight.train(range(3))
        straight.accelerator.save_state(str(tmp_path))
        straight.train(range(3, 5))
        resumed.accelerator.load_state(str(tmp_path))
        resumed.train(range(3, 5))
        assert bits(straight.model) == bits(resumed.model)
        assert resumed.optimizer.optimizer.updates == 5


def test_accelerates_own_file_of_one_ranks_part_is_refused(tmp_path):
    """It would hold the states of rank 0 alone, which no rank could load."""

    @on_ranks(2)
    def _(rank):
        run = OfRanks(0)
        run.train([0])
        if rank == 0:
            with pytest.raises(StateError, match="a file for all ranks would lack the others' parts; expected"):
                run.accelerator.save_state(str(tmp_path))
        else:
            run.accelerator.save_state(str(tmp_path))
        file = io.BytesIO()
        torch.save(copy.deepcopy(run.optimizer.state_dict()), file)
        file.seek(0)
        run.optimizer.load_state_dict(torch.load(file))


def test_a_step_that_grad_scaler_skips_is_none():
    """Neither states, parameters nor the schedule move, and the loss scale falls."""
    runs = [
        Run(new, accumulate=1, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)).train(
            overflow_at=2
        )
        for new in (ours, torchs)
    ]
    assert_same_run(*runs)
    assert runs[0].skipped == [i == 2 for i in range(6)]
    assert runs[0].accelerator.scaler.get_scale() == runs[1].accelerator.scaler.get_scale() == 1024.0
    assert {float(state["step"]) for state in runs[0].optimizer.state.values()} == {5.0}
    assert runs[0].schedule.get_last_lr() == [pytest.approx(1e-2 / 6)]
