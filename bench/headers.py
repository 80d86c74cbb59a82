"""The cost of the headers of exchanges: training steps on two gloo ranks with and without them, in turn, in one run.

``python -m bench.headers`` prints, for models and bucket sizes, the median step and the quartiles of the ratio of
neighbouring steps. Training needs the headers: without them, ranks that differ abort inside gloo.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from bench.peers import free_port
from frontends.torch import wrap
from frontends.torch.ranks.private_group import PrivateGroup

CASES = ((2, 16, 768, 1_000_000), (3, 16, 768, 1_000_000), (2, 8, 2048, 16_000_000), (3, 8, 2048, 16_000_000))
"""Stage, layers, width and ``reduce_bucket_size`` of each case."""
WARM_UP, STEPS = 4, 60


def rank_of(rank: int, port: int, stage: int, layers: int, width: int, bucket: int) -> None:
    """One rank's part of a case; the first prints."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    agree, seen = PrivateGroup._compare_headers, 0

    def with_header(group: PrivateGroup, header: object) -> None:
        nonlocal seen
        seen += 1
        agree(group, header)  # type: ignore[arg-type]

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
    fields = {"offload_param": "cpu", "param_persistence_threshold": 0} if stage == 3 else {}
    engine = wrap(
        model, lr=1e-3, param_dtype="bfloat16", stage=stage, reduce_bucket_size=bucket, num_threads=1, **fields
    )
    inputs = torch.randn(64, width)
    wall: dict[bool, list[float]] = {True: [], False: []}
    busy: dict[bool, list[float]] = {True: [], False: []}
    for number in range(WARM_UP + STEPS):
        headers = number % 2 == 0
        PrivateGroup._compare_headers = with_header if headers else (lambda group, header: None)  # type: ignore[method-assign]
        dist.barrier()
        seen = seen if not headers else 0
        start, used = time.perf_counter(), time.process_time()
        engine.backward(engine(inputs).float().pow(2).mean())
        engine.step()
        engine.flush()
        dist.barrier()
        if number >= WARM_UP:
            wall[headers].append(time.perf_counter() - start)
            busy[headers].append(time.process_time() - used)
    if rank == 0:
        print(f"stage {stage}, {layers} layers of width {width}, {seen} exchanges a step", flush=True)
        for what, times in (("wall", wall), ("processor", busy)):
            without, having = (1e3 * statistics.median(times[each]) for each in (False, True))
            ratios = [a / b for a, b in zip(times[True], times[False], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"  {what}: {without:.1f} -> {having:.1f} ms, {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
    dist.destroy_process_group()


def main() -> None:
    for case in CASES:
        mp.spawn(rank_of, (free_port(), *case), nprocs=2)


if __name__ == "__main__":
    main()
