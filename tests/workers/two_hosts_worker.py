"""One rank of a run over two machines, whose places Slurm's variables tell: FRAMEWORK PHASE FOLDER.

``first`` trains without an interruption and writes what each step came to; then it trains again, saves, and waits in
the middle of a step until the network is gone. ``resumed`` goes on from the checkpoint and writes its steps.
"""

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np

from tests.support.launched import CUT, SAVED, STEPS

TIMEOUT = 120
"""Seconds that a rank waits for the other, which may share a busy processor with it."""
CUT_OFF = 3
"""Seconds that it waits where the other cannot come."""


def batch(step, rank):
    return np.random.default_rng([step, rank]).standard_normal((8, 32)).astype(np.float32)


class Torch:
    """A model, made anew by each :meth:`start`, on the ranks of this process's group."""

    def __init__(self, meet):
        import torch

        from frontends.torch import init_process_group, wrap

        meet()
        init_process_group("cpu", timeout=timedelta(seconds=TIMEOUT))
        self.torch, self.wrap = torch, wrap
        self.rank = torch.distributed.get_rank()

    def start(self):
        self.torch.manual_seed(0)
        model = self.torch.nn.Sequential(*(self.torch.nn.Linear(32, 32) for _ in range(3)))
        self.engine = self.wrap(model, lr=1e-2, gradient_clipping=0.05, reduce_bucket_size=1500)

    def step(self, step, midway):
        loss = self.engine(self.torch.from_numpy(batch(step, self.rank))).pow(2).mean()
        midway()
        self.engine.backward(loss)
        self.engine.step()

    def parameters(self):
        return [p.detach().numpy() for p in self.engine.parameters()]

    def save(self, folder):
        self.engine.save_checkpoint(folder)

    def load(self, folder):
        self.engine.load_checkpoint(folder)

    def hurry(self):
        from frontends.torch.ranks.private_group import PrivateGroup

        agree = PrivateGroup._compare_headers

        def hastily(group, header):
            group._line._seconds = CUT_OFF
            agree(group, header)

        PrivateGroup._compare_headers = hastily

    def part(self):
        self.torch.distributed.destroy_process_group()


class Jax:
    """The same."""

    def __init__(self, meet):
        import jax

        from frontends.jax import initialize, wrap

        meet()
        jax.config.update("jax_platforms", "cpu")
        initialize(timeout_seconds=TIMEOUT)
        self.jax, self.wrap = jax, wrap
        self.rank = jax.process_index()
        self.mesh = jax.make_mesh((jax.device_count(),), ("dp",))

    def start(self):
        rng = np.random.default_rng(0)
        params = {f"w{i}": rng.standard_normal((32, 32)).astype(np.float32) / 6 for i in range(3)}
        self.offloaded = self.wrap(params, lr=1e-2, gradient_clipping=0.05, reduce_bucket_size=1500, mesh=self.mesh)

        def loss(params, x):
            return ((x @ params["w0"] @ params["w1"] @ params["w2"]) ** 2).mean()

        self.grad_fn = self.offloaded.value_and_grad(loss)

    def step(self, step, midway):
        split = self.jax.sharding.NamedSharding(self.mesh, self.jax.sharding.PartitionSpec("dp"))
        mine = self.jax.make_array_from_process_local_data(split, batch(step, self.rank))
        loss, grads = self.grad_fn(self.offloaded.params, mine)
        self.jax.block_until_ready((loss, grads))
        midway()
        self.offloaded.update(grads)

    def parameters(self):
        return [np.asarray(p.addressable_data(0)) for p in self.jax.tree.leaves(self.offloaded.params)]

    def save(self, folder):
        self.offloaded.save_checkpoint(folder)

    def load(self, folder):
        self.offloaded.load_checkpoint(folder)

    def hurry(self):
        from frontends.jax.devices import launch

        launch._watch._seconds = CUT_OFF

    def part(self):
        self.jax.distributed.shutdown()


def main(framework, phase, folder):
    rank = os.environ["SLURM_PROCID"]

    def mark(name):
        (folder / f"{name}-{rank}").touch()

    def await_file(name):
        while not (folder / name).exists():
            time.sleep(0.01)

    def meet():  # what was imported in other times is not part of the wait for each other
        mark(f"{phase}-imported")
        for other in "01":
            await_file(f"{phase}-imported-{other}")

    def digest():
        return hashlib.sha256(b"".join(p.tobytes() for p in model.parameters())).hexdigest()

    def train(steps, midway=lambda: None):
        for step in steps:
            model.step(step, midway if step == CUT else lambda: None)
            yield digest()

    def write(digests):
        (folder / f"{phase}-{rank}.json").write_text(json.dumps(digests))

    def lose_the_network():
        mark("midway")
        await_file("cut")
        model.hurry()

    model = {"torch": Torch, "jax": Jax}[framework](meet)
    model.start()
    if phase == "resumed":
        model.load(folder / "checkpoints")
        write(list(train(range(SAVED, STEPS))))
        model.part()
        return
    write(list(train(range(STEPS))))
    model.start()
    list(train(range(SAVED)))
    model.save(folder / "checkpoints")
    list(train(range(SAVED, STEPS), lose_the_network))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
