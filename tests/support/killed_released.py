"""A run that saves, releases its device and takes it again, until it is killed at a random moment of that."""

import os
import random
import signal
import threading
import time
from pathlib import Path

from frontends.torch import wrap
from tests.support import simulated
from tests.support.phases import mixed, train
from tests.support.torch_models import on
from tests.support.torch_rank import whole_bits

FIELDS = {"lr": 1e-2, "param_dtype": "bfloat16", "reduce_bucket_size": 2000}


def states(n):
    """The bits of the parameters after each of n steps."""
    engine, found = wrap(mixed(), **FIELDS), []
    for seed in range(n):
        found.append(whole_bits(engine))
        train(engine, [seed])
    engine.close()
    return found


def run(folder, seed):
    """Resume, tell which step of which bits that was, and go on until killed."""
    simulated.load()
    folder, chance = Path(folder), random.Random(seed)
    with on(simulated.NAME):
        engine = wrap(mixed(), **FIELDS)
        engine.load_checkpoint(folder / "saved", missing_ok=True)
        done = engine.optimizer.updates
        (folder / f"{seed}.resumed").write_text(f"{done} {whole_bits(engine)}")
        took = 0.0
        for n in range(3):
            train(engine, [done + n])
            engine.save_checkpoint(folder / "saved", keep=2)
            if n == 2:
                delay = chance.uniform(0, took)
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            began = time.monotonic()
            engine.release()
            (folder / f"{seed}.released").write_text(str(n))
            engine.restore()
            train(engine, [done + n + 1]) if n == 2 else None
            took = time.monotonic() - began
        time.sleep(60)  # the end may come a little later
