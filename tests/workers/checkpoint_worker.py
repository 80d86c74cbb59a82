"""One rank of a real process group that saves and resumes: SCENARIO RANK WORLD_SIZE FOLDER, as rank_worker.py."""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from frontends.torch import gathered_parameters, wrap
from offload_core.step.state_access import StateAccess
from tests.support.torch_rank import main

FOLDER = Path(sys.argv[4]).parent / "checkpoints"
MICRO_BATCHES = 4
"""Of each update, whatever the ranks."""
STEPS, SAVED = 30, 10
STAGE_3 = {"stage": 3, "param_persistence_threshold": 40, "max_live_parameters": 1500}
STAGES = {
    "1": {"stage": 1},
    "2": {"stage": 2, "update_in_backward": True},
    "3": STAGE_3,
    "3 in host memory": {**STAGE_3, "offload_param": "cpu"},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 3},
}
DTYPES = ("float32", "bfloat16", "float16")


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

    def __init__(self, rank, world_size, bucket, **fields):
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
            **fields,
        )
        self.schedule = LambdaLR(self.engine.optimizer, lambda step: 1 / (1 + step))
        self.losses = []

    def rounded(self, gradient):
        unit = self.engine.optimizer.pipeline.loss_scale / 1024
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
        pipeline = self.engine.optimizer.pipeline
        for i, spec in enumerate(pipeline.params):
            whole = torch.zeros(3, spec.numel, dtype=torch.float64)
            for start, views in StateAccess(pipeline).states(i):
                for row, name in enumerate(("master", "exp_avg", "exp_avg_sq")):
                    if name in views and not (row == 0 and spec.dtype.itemsize == 4):  # those may be the parameters
                        whole[row, start : start + views[name].size] = torch.from_numpy(views[name].astype("float64"))
            if self.world_size > 1:
                torch.distributed.all_reduce(whole)
            found[f"states of {spec.name}"] = whole.numpy().tobytes()
            found[f"steps of {spec.name}"] = str(float(pipeline.steps[i])).encode()
        found["loss scale"] = str(pipeline.scaler.state_dict() if pipeline.scaler else None).encode()
        found["lr"] = str(self.schedule.get_last_lr()).encode()
        return {name: hashlib.sha256(value).hexdigest() for name, value in found.items()}


def cases():
    for stage, fields in STAGES.items():
        for dtype in DTYPES:
            yield f"{stage}, {dtype}", {**fields, "param_dtype": dtype}


def straight(rank, world_size):
    """Save on the way, and go on."""
    result = {}
    for i, (name, fields) in enumerate(cases()):
        run = Run(rank, world_size, 700, **fields)
        run.train(range(SAVED))
        stateful = {"schedule": run.schedule}
        run.engine.save_checkpoint(FOLDER / name, stateful=stateful, extras={"step": SAVED}, wait=i % 2 == 0)
        run.train(range(SAVED, STEPS))
        run.engine.wait_for_checkpoint()
        result[name] = run.bits()
    return result


def resumed(rank, world_size):
    result = {}
    for name, fields in cases():
        run = Run(rank, world_size, 400, **fields)
        extras = run.engine.load_checkpoint(FOLDER / name, stateful={"schedule": run.schedule})
        run.train(range(extras["step"], STEPS))
        result[name] = run.bits()
    return result


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


def refused(rank, world_size):
    """What stops one rank stops all, at once, and they go on together."""
    said = []
    engine = wrap(nn.Linear(3, 3), stage=1, gradient_accumulation_steps=2)

    def save(**options):
        try:
            engine.save_checkpoint(FOLDER, **options)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}"[:60])

    save(stateful={"it": OnRankZeroAlone(rank)})
    with engine.no_sync():
        engine.backward(engine(torch.ones(2, 3)).sum())
        save()
        engine.step()
    save()
    engine.optimizer.zero_grad()
    engine.save_checkpoint(FOLDER)
    return said


def signalled(rank, world_size):
    """One rank gets a signal in its second step, and another one after its fourth: all save after the same steps."""
    engine = wrap(nn.Linear(3, 3), stage=1, gradient_accumulation_steps=2)
    saver = engine.save_on_signal(FOLDER, [signal.SIGUSR1], keep=5)
    saved = []
    for update in range(1, 7):
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3)).sum())
            if (rank, update) == (1, 2):
                os.kill(os.getpid(), signal.SIGUSR1)
            engine.step()
            path = saver.save({"update": update})
            saved += [] if path is None else [[update, path.name]]
        if (rank, update) == (0, 4):
            os.kill(os.getpid(), signal.SIGUSR1)
    saver.close()
    return {
        "saved": saved,
        "last": engine.load_checkpoint(FOLDER),
        "after": signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
    }


if __name__ == "__main__":
    main(globals(), timeout=100)  # disks may be slow
