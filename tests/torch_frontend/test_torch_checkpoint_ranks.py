"""Resuming in new processes, in as many ranks as before or fewer, is invisible."""

import hashlib
import os
import signal

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from frontends.torch import gathered_parameters, wrap
from offload_core.step.state_access import StateAccess
from tests.support.late_stores import STATES_ON_DISK
from tests.support.processes import on_ranks
from tests.support.torch_rank import said_by

MICRO_BATCHES = 4
"""Of each update, whatever the ranks."""
STEPS, SAVED = 30, 10
STAGE_3 = {"stage": 3, "param_persistence_threshold": 40, "max_live_parameters": 1500}
STAGES = {
    "1": {"stage": 1},
    "2": {"stage": 2, "update_in_backward": True},
    "3": STAGE_3,
    "3 in host memory": {**STAGE_3, "offload_param": "cpu"},
    "3 on disk": {**STAGE_3, "offload_param": "nvme", **STATES_ON_DISK},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 3},
}
DTYPES = ("float32", "bfloat16", "float16")
QUICK = {("2", "bfloat16"), ("3 on disk", "bfloat16"), ("3 in host memory", "float16"), ("delayed", "float32")}


class Tied(nn.Module):
    """Its output weight is its embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 24)
        self.inner = nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)

    def forward(self, x):
        x = self.embedding(x)
        return self.norm(x + torch.tanh(self.inner(x))) @ self.embedding.weight.T


def loss_of(model, index):
    x = torch.randint(0, 50, (9, 8), generator=torch.Generator().manual_seed(index))
    return nn.functional.cross_entropy(model(x[:-1]).flatten(0, 1).float(), x[1:].flatten())


class Run:
    """Training whose gradients sum exactly, so that it is the same for any number of ranks."""

    def __init__(self, rank, world_size, bucket, stage, dtype):
        self.rank, self.world_size = rank, world_size
        self.accumulate = MICRO_BATCHES // world_size
        model = Tied()
        for param in model.parameters():
            param.register_hook(self.rounded)
        self.engine = wrap(
            model,
            lr=3e-3,
            gradient_clipping=0.5,
            gradient_accumulation_steps=self.accumulate,
            reduce_bucket_size=bucket,
            initial_loss_scale=2.0**30,  # that overflows first, and grows later
            loss_scale_window=7,
            param_dtype=dtype,
            **STAGES[stage],
        )
        self.schedule = LambdaLR(self.engine.optimizer, lambda step: 1 / (1 + step))

    def rounded(self, gradient):
        unit = self.engine.optimizer.core.loss_scale / 1024
        return ((gradient.double() / unit).round() * unit).to(gradient.dtype)

    def train(self, steps):
        for step in steps:
            for turn in range(self.accumulate):
                loss = loss_of(self.engine, MICRO_BATCHES * step + turn * self.world_size + self.rank)
                self.engine.backward(loss)
                report = self.engine.step()
            if report.updated:
                self.schedule.step()

    def bits(self):
        """Of everything, whatever the ranks hold of it."""
        found = {}
        with gathered_parameters(self.engine.module.parameters()):
            for name, param in self.engine.module.named_parameters():
                found[name] = param.detach().contiguous().view(torch.uint8).numpy().tobytes()
        pipeline = self.engine.optimizer.core._pipeline
        for i, spec in enumerate(pipeline.params):
            whole = torch.zeros(3, spec.numel, dtype=torch.float64)
            for start, views in pipeline.state_lock.change("a test", StateAccess(pipeline).states, i):
                for row, name in enumerate(("master", "exp_avg", "exp_avg_sq")):
                    if name in views and not (row == 0 and spec.dtype.itemsize == 4):  # those may be the parameters
                        whole[row, start : start + views[name].size] = torch.from_numpy(views[name].astype("float64"))
            torch.distributed.all_reduce(whole)
            found[f"states of {spec.name}"] = whole.numpy().tobytes()
            found[f"steps of {spec.name}"] = str(float(pipeline.counts.steps[i])).encode()
        found["loss scale"] = str(pipeline.scaler.state_dict() if pipeline.scaler else None).encode()
        found["lr"] = str(self.schedule.get_last_lr()).encode()
        return {name: hashlib.sha256(value).hexdigest() for name, value in found.items()}


@pytest.mark.long("thirty steps on two ranks or more: a loss scale is found, or a run saved and gone on with")
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
     for case in ((stage, dtype) for stage in STAGES for dtype in DTYPES)],
)  # fmt: skip
def test_thirty_steps_are_ten_saved_and_twenty_by_as_many_ranks_or_fewer(stage, dtype, tmp_path, drawn):
    @on_ranks(4)
    def straight(rank):
        run = Run(rank, 4, 700, stage, dtype)
        run.train(range(SAVED))
        stateful = {"schedule": run.schedule}
        run.engine.save_checkpoint(tmp_path, stateful=stateful, extras={"step": SAVED}, wait=stage in "13")
        run.train(range(SAVED, STEPS))
        run.engine.wait_for_checkpoint()
        return run.bits()

    assert straight == straight[:1] * 4
    for world_size in drawn((4, 2, 1), 1):

        @on_ranks(world_size)
        def resumed(rank, world_size=world_size):
            run = Run(rank, world_size, 400, stage, dtype)
            extras = run.engine.load_checkpoint(tmp_path, stateful={"schedule": run.schedule})
            run.train(range(extras["step"], STEPS))
            return run.bits()

        assert resumed == straight[:1] * world_size


def test_ranks_begin_together_where_there_is_nothing_and_refuse_what_one_alone_sees(tmp_path):
    @on_ranks(2)
    def said(rank):
        engine = wrap(nn.Linear(3, 3))
        none = engine.load_checkpoint(tmp_path / "none", missing_ok=True)
        if rank == 0:
            wrap(nn.Linear(3, 3), process_group=torch.distributed.new_group([0], use_local_synchronization=True))\
                .save_checkpoint(tmp_path / "0")  # fmt: skip
        torch.distributed.barrier()
        return none, said_by(lambda: engine.load_checkpoint(tmp_path / str(rank), missing_ok=True))

    assert [none for none, _ in said] == [None, None]
    assert "no checkpoint on process 1, and not so on process 0; expected one folder" in said[1][1]
    assert "CheckpointError" in said[0][1]


@pytest.mark.long("thirty steps on two ranks or more: a loss scale is found, or a run saved and gone on with")
def test_thirty_steps_in_float16_are_the_same_in_each_stage(drawn):
    others = drawn(("2", "3", "3 in host memory"), 1)

    @on_ranks(2)
    def found(rank):
        result = []
        for stage in ("1", *others):
            run = Run(rank, 2, 700, stage, "float16")
            run.train(range(STEPS))
            result.append(run.bits())
        return result

    assert all(bits == found[0][0] for of_one in found for bits in of_one)


class OnRankZeroAlone:
    """A stateful object that only one rank has the state of."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        if self.rank:
            raise ValueError("not here")
        return {}

    def load_state_dict(self, state):
        pass


def test_what_one_rank_cannot_save_none_does_and_gradients_that_were_not_sent_count(tmp_path):
    """An error on one rank stops all ranks at once, and they go on together."""

    @on_ranks(2)
    def _(rank):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
        engine = wrap(model, stage=1, gradient_accumulation_steps=2)
        failed = "CheckpointError: save of a checkpoint failed in process 1, a"
        waiting = "StateError: a checkpoint is asked for between backward() and"

        def said(**options):
            return said_by(lambda: engine.save_checkpoint(tmp_path, **options))

        expected = failed if rank == 0 else "ValueError: not here"
        assert said(stateful={"it": OnRankZeroAlone(rank)}).startswith(expected)
        with engine.no_sync():
            engine.backward(engine(torch.ones(2, 3)).sum())
            assert said().startswith(waiting)
            engine.step()
        assert said().startswith(waiting)
        engine.optimizer.zero_grad()
        expected = failed if rank == 0 else "CheckpointError: save: process 1 was given {'step': 0, 'keep"
        assert said(frozen=rank == 0).startswith(expected)
        assert said() is None

    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000000"]


def test_all_ranks_save_after_the_step_in_which_one_had_a_signal(tmp_path):
    """One in its second step, and another one after its fourth."""

    @on_ranks(2)
    def _(rank):
        engine = wrap(nn.Linear(3, 3), stage=1, gradient_accumulation_steps=2)
        saver = engine.save_on_signal(tmp_path, [signal.SIGUSR1], keep=5)
        saved = []
        for update in range(1, 7):
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 3)).sum())
                if (rank, update) == (1, 2):
                    os.kill(os.getpid(), signal.SIGUSR1)
                engine.step()
                path = saver.save({"update": update})
                saved += [] if path is None else [(update, path.name)]
            if (rank, update) == (0, 4):
                os.kill(os.getpid(), signal.SIGUSR1)
        saver.close()
        assert saved == [(2, "step-00000002"), (5, "step-00000005")]
        assert engine.load_checkpoint(tmp_path) == {"update": 5}
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
