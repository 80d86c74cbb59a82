"""One rank of a group whose ranks go different ways: NUMBERS RANK WORLD_SIZE FOLDER; runs the cases "3,5,7".

A case is a random configuration and a random program of forwards, backwards, steps and evaluations. One rank breaks the
protocol once: it skips an action, repeats it, does it after the next one, or fails in its midst and tries again. Each
rank reports its error, or its bits beside those of the program as all ranks should run it.
"""

import gc
import random
import sys
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from frontends.torch import gathered_parameters, wrap
from offload_core import OffloadError
from tests.support.torch_rank import bits, main

LAYERS = 4
WAYS = ("skip", "repeat", "later", "retry", "retry after zero_grad", "other modules")
PATIENCE = timedelta(seconds=60)


class Layers(nn.Module):
    """Layers of equal size, of which a rank may run some, in any order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))
        self.fail_in: int | None = None

    def forward(self, x, order):
        for i in order:
            if self.fail_in == i:
                self.fail_in = None
                raise InterruptedError("its own")
            x = torch.tanh(self.parts[i](x))
        return x.pow(2).mean()


class Run:
    """One rank's run of a case."""

    def __init__(self, rank, config, group=None):
        self.rank, self.seed, self.loss = rank, 0, None
        self.model = Layers()
        self.engine = wrap(self.model, lr=1e-2, process_group=group, **config)
        self.fail_at = None
        self.order = range(LAYERS)
        for i, part in enumerate(self.model.parts):
            part.weight.register_hook(lambda g, i=i: self.fail(i))

    def fail(self, layer):
        if self.fail_at == layer:
            self.fail_at = None
            raise InterruptedError("its own")

    def batch(self):
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * self.seed + self.rank))

    def forward(self):
        self.loss = self.engine(self.batch(), self.order)

    def backward(self):
        if self.loss is not None:
            self.engine.backward(self.loss, retain_graph=True)

    def train(self):
        self.forward()
        self.backward()

    def step(self):
        self.loss = None
        self.engine.step()
        self.seed += 1

    def evaluate(self):
        with torch.no_grad():
            self.engine(self.batch(), self.order)

    def states(self):
        self.engine.optimizer.whole_states(self.model.parts[0].weight)


def case_of(number, world_size):
    """The configuration, the program, and who breaks it where and how."""
    rng = random.Random(number)
    config = {
        "stage": rng.choice([1, 2, 3, 3]),
        "reduce_bucket_size": rng.choice([100, 300, 2000]),
        "schedule": rng.choice(["overlap", "overlap", "serial", "delayed"]),
        "gradient_accumulation_steps": rng.choice([1, 1, 2]),
        "gradient_clipping": rng.choice([None, 0.1]),
        "param_dtype": rng.choice([None, "bfloat16"]),
    }
    if config["stage"] == 3:
        config |= {"param_persistence_threshold": rng.choice([1, 100]), "max_reuse_distance": rng.choice([0, 10**6])}
    else:
        config["update_in_backward"] = config["schedule"] == "overlap" and rng.random() < 0.3
    program = []
    for _ in range(3):
        for _ in range(config["gradient_accumulation_steps"]):
            program += [*(["forward", "backward"] if rng.random() < 0.7 else ["train"]), "step"]
        program += rng.choice([[], [], ["evaluate"], ["states"], ["evaluate", "evaluate"]])
    at = rng.randrange(len(program))
    return config, program, rng.randrange(world_size), at, rng.choice(WAYS), rng.randrange(LAYERS), rng


def broken(run, program, at, way, layer, rng):
    """Run the program and break it at one place."""
    program = list(program)
    if way == "skip":
        del program[at]
    elif way == "repeat":
        program.insert(at, program[at])
    elif way == "later":
        program[at : at + 2] = reversed(program[at : at + 2])
    for i, action in enumerate(program):
        if i == at and way == "other modules":
            run.order = rng.sample(range(LAYERS), rng.randrange(1, LAYERS + 1))
        if i == at and way.startswith("retry"):
            run.fail_at = run.model.fail_in = layer
            try:
                getattr(run, action)()
            except InterruptedError:
                if way == "retry after zero_grad":
                    run.engine.optimizer.zero_grad()
            run.fail_at = run.model.fail_in = None
        getattr(run, action)()
        run.order = range(LAYERS)


def result_of(run):
    """Bits of the parameters, once all ranks have come to the end: a rank may be behind the others without an error."""
    run.states()
    run.engine.flush()
    with gathered_parameters(run.model.parameters()):
        return bits(run.model)


def case(number, rank, world_size, group):
    config, program, who, at, way, layer, rng = case_of(number, world_size)
    reference = Run(rank, config)
    for action in program:
        getattr(reference, action)()
    said = {
        "way": way,
        "case": f"{config} {program} rank {who} at {at}: {way} {layer}",
        "reference": result_of(reference),
    }
    reference.engine.close()
    run = Run(rank, config, group)
    try:
        if rank == who:
            broken(run, program, at, way, layer, rng)
        else:
            for action in program:
                getattr(run, action)()
        said["bits"] = result_of(run)
    except OffloadError as error:
        said["error"] = f"{type(error).__name__}: {error}"
        with suppress(OffloadError):  # nothing hangs afterwards, either
            run.train()
            run.step()
    except Exception as error:
        said["raw"] = f"{type(error).__name__}: {error}"
    return said


def cases(rank, world_size):
    store, group, said = dist.group.WORLD.get_group_store(), dist.new_group(timeout=timedelta(seconds=1)), []
    for number in map(int, sys.argv[1].split(",")):
        said.append(case(number, rank, world_size, group))
        gc.collect()
        store.set(f"done/{number}/{rank}", "")
        store.wait([f"done/{number}/{other}" for other in range(world_size)], PATIENCE)
    return said


if __name__ == "__main__":
    main({sys.argv[1]: cases}, timeout=60)
