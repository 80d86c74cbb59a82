"""One rank of one contender of ``bench.ranks``: answers each line ``{"steps": n}`` with how long its steps took.

Between two lines it waits in a read, so that it costs the others nothing; how much of a processor it took all the same
is part of the answer.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LEARNING_RATE = 3e-4
CLIPPING = 1.0
OURS = "offload-core"
PLAIN = "DDP, no offload"
OURS_3 = "offload-core, stage 3"
DEEPSPEED: dict[str, dict[str, Any]] = {
    "DeepSpeed": {},
    "DeepSpeed, overlap_comm": {"overlap_comm": True},
    "DeepSpeed, allreduce": {"reduce_scatter": False},
    "DeepSpeed, stage 3": {"stage": 3},
    "DeepSpeed, stage 3, overlap_comm": {"stage": 3, "overlap_comm": True},
}
"""What differs from `deepspeed_config`; the comparison is with the fastest."""
CONTENDERS = {
    2: (OURS, *(name for name, zero in DEEPSPEED.items() if "stage" not in zero), PLAIN),
    3: (OURS_3, *(name for name, zero in DEEPSPEED.items() if "stage" in zero), OURS),
}
"""Of each stage, the one that the others are compared with first."""
TOKENS = 256
"""Tokens drawn; fewer than the vocabulary, so that there is something to learn."""


class Training(NamedTuple):
    forward: Callable[[Any, Any], Any]
    backward: Callable[[Any], None]
    step: Callable[[], float]
    """Returns the norm of the gradients before clipping."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    name, settings = sys.argv[1], json.loads(sys.argv[2])

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    import torch
    import torch.distributed as dist

    from bench.gpt_torch import GPT
    from offload_core.model_shapes import GPTConfig

    torch.set_num_threads(settings["threads"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    training = make_training(name, GPT(GPTConfig(**settings["gpt"])), settings)
    batches = make_batches(settings["micro_batch"], settings["context"])
    for _ in range(settings["warm_up"]):
        timed_step(training, *next(batches))
    answer(setup_peak=peak_rss(), versions=versions(name))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: building a trainer is not training
    idle_cpu = idle_wall = 0.0
    while True:
        cpu, wall = time.process_time(), time.perf_counter()
        line = sys.stdin.readline()
        if not line:
            break
        turn = time.process_time()
        idle_cpu, idle_wall = idle_cpu + turn - cpu, idle_wall + time.perf_counter() - wall
        done = [timed_step(training, *next(batches)) for _ in range(json.loads(line)["steps"])]
        answer(steps=done, idle=idle_cpu / idle_wall, cpu=time.process_time() - turn, peak=peak_rss())
    dist.destroy_process_group()


def timed_step(training: Training, inputs: Any, targets: Any) -> dict[str, float]:
    """Seconds of each phase, and what shows that the contenders train alike."""
    start = time.perf_counter()
    loss = training.forward(inputs, targets)
    forward = time.perf_counter()
    training.backward(loss)
    backward = time.perf_counter()
    norm = training.step()
    end = time.perf_counter()
    seconds = {"forward": forward - start, "backward": backward - forward, "step": end - backward, "total": end - start}
    return {**seconds, "loss": loss.item(), "grad_norm": norm}


def make_batches(micro_batch: int, context: int) -> Iterator[tuple[Any, Any]]:
    """The same for every contender, another for each rank."""
    import torch
    import torch.distributed as dist

    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    while True:
        windows = torch.randint(TOKENS, (micro_batch, context + 1), generator=draw)
        yield windows[:, :-1], windows[:, 1:]


def make_training(name: str, model: Any, settings: dict[str, Any]) -> Training:
    if name in (OURS, OURS_3):
        return offload_core(model, settings, stage=3 if name == OURS_3 else 2)
    return plain(model) if name == PLAIN else deepspeed(model, settings, DEEPSPEED[name])


def adam_arguments() -> dict[str, Any]:
    from bench.presets import BETAS, WEIGHT_DECAY

    return {"lr": LEARNING_RATE, "betas": BETAS, "eps": 1e-8, "weight_decay": WEIGHT_DECAY}


def offload_core(model: Any, settings: dict[str, Any], stage: int) -> Training:
    from frontends.torch import wrap

    engine = wrap(
        model,
        stage=stage,
        param_dtype="bfloat16",
        gradient_clipping=CLIPPING,
        num_threads=settings["threads"],
        **adam_arguments(),
    )
    return Training(engine, engine.backward, lambda: engine.step().grad_norm)


def deepspeed_config(micro_batch: int, zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": adam_arguments()},  # with the offload: DeepSpeedCPUAdam
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "overlap_comm": False,
            **zero,
        },
    }


def deepspeed(model: Any, settings: dict[str, Any], zero: dict[str, Any]) -> Training:
    from deepspeed import initialize
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    config = deepspeed_config(settings["micro_batch"], zero)
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    if not isinstance(engine.optimizer.optimizer, DeepSpeedCPUAdam):
        raise TypeError(f"DeepSpeed chose {type(engine.optimizer.optimizer).__name__}, expected its DeepSpeedCPUAdam")

    def step() -> float:
        engine.step()
        return float(engine.get_global_grad_norm())

    return Training(engine, engine.backward, step)


def plain(model: Any) -> Training:
    """Every rank holds all states and updates all parameters."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    ranks = DistributedDataParallel(model.bfloat16(), gradient_as_bucket_view=True)
    parameters = list(ranks.parameters())
    optimizer = torch.optim.AdamW(masters, fused=True, **adam_arguments())

    @torch.no_grad()
    def step() -> float:
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(masters, CLIPPING)
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.copy_(master)
            parameter.grad = master.grad = None
        return norm.item()

    return Training(ranks, lambda loss: loss.backward(), step)


def peak_rss() -> int:
    """Bytes; the kernel's high-water mark of this process's resident set."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def versions(name: str) -> dict[str, str]:
    import torch

    known = {"torch": torch.__version__}
    if name in DEEPSPEED:
        import deepspeed

        known["deepspeed"] = deepspeed.__version__
    return known


if __name__ == "__main__":
    main()
