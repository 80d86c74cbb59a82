"""The number of elements whose bits change when the same update is cut into shards.

Each contender updates the same parameters with the same gradients for some steps, in one part and in several. Training
can continue bit for bit on another number of ranks only if no bit changes.
"""

import itertools
from collections.abc import Callable

import numpy as np
import torch

from bench.peers import find_compilers
from bench.record import append, missing, parser, row, versions
from offload_core.dtypes import FLOAT32
from offload_core.native import kernels
from offload_core.rules.adam import Adam, AdamHyper
from offload_core.support.processors import available_cpus

_RULE, _HYPER = Adam("torch"), AdamHyper(1e-3)
_MOST_CUT = 200

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Parameters and both moments."""
Update = Callable[[list[np.ndarray], list[slice]], Arrays]
"""A function that starts from the first array and takes a step with each of the others, in the given parts."""


def this(threads: int) -> Update:
    def update(arrays: list[np.ndarray], parts: list[slice]) -> Arrays:
        param = arrays[0].copy()
        exp_avg, exp_avg_sq = np.zeros_like(param), np.zeros_like(param)
        for t, grad in enumerate(arrays[1:], 1):
            rows = [
                {
                    "grad": kernels.address(grad[part]),
                    "master": kernels.address(param[part]),
                    "moments": [kernels.address(moment[part]) for moment in (exp_avg, exp_avg_sq)],
                    "numel": param[part].size,
                }
                for part in parts
            ]
            kernels.update(
                kernels.segments_of(rows),
                np.array([_RULE.scalars(_HYPER, t, grad_scale=1.0)], kernels.SCALARS),
                grad_dtype=FLOAT32,
                param_dtype=None,
                rule="adam_torch",
                threads=threads,
            )
        return param, exp_avg, exp_avg_sq

    return update


def through(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> Update:
    """Return the update by an optimizer of torch's protocol; each part is a separate parameter."""

    def update(arrays: list[np.ndarray], parts: list[slice]) -> Arrays:
        params = [torch.nn.Parameter(torch.from_numpy(arrays[0][part].copy())) for part in parts]
        optimizer = make(params)
        for grad in arrays[1:]:
            for param, part in zip(params, parts, strict=True):
                param.grad = torch.from_numpy(grad[part].copy())
            optimizer.step()
        state = [optimizer.state[param] for param in params]
        moments = (torch.cat([s[name] for s in state]).numpy() for name in ("exp_avg", "exp_avg_sq"))
        return torch.cat([param.detach() for param in params]).numpy(), *moments

    return update


def torch_fused(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=_HYPER.lr, weight_decay=_HYPER.weight_decay, fused=True)


def deepspeed(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, lr=_HYPER.lr, weight_decay=_HYPER.weight_decay)


def changed(update: Update, arrays: list[np.ndarray], cuts: list[int]) -> dict[int, tuple[int, int]]:
    """Return, for each number of parts, the parameters whose bits differ from those of one part, and the elements with
    any difference."""
    numel = arrays[0].size
    counts, whole = {}, update(arrays, [slice(0, numel)])
    for n in cuts:
        ends = [numel * i // n for i in range(n + 1)]
        cut = update(arrays, [slice(a, b) for a, b in itertools.pairwise(ends)])
        differ = [a.view(np.int32) != b.view(np.int32) for a, b in zip(whole, cut, strict=True)]
        counts[n] = int(differ[0].sum()), int(np.logical_or.reduce(differ).sum())
    return counts


def main(arguments: list[str] | None = None) -> None:
    options = parser("exactness", __doc__.splitlines()[0])
    options.add_argument("--numel", type=int, default=1_000_003)
    options.add_argument("--steps", type=int, help="default: 10")
    options.add_argument("--cuts", type=int, nargs="+", default=[1, 2, 5, _MOST_CUT])
    args = options.parse_args(arguments)
    steps, threads = args.steps or (2 if args.quick else 10), available_cpus()
    torch.set_num_threads(threads)
    find_compilers()
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(args.numel, np.float32) for _ in range(steps + 1)]
    contenders = {"this": this(threads), "torch AdamW, fused": through(torch_fused)}
    contenders["DeepSpeedCPUAdam"] = through(deepspeed)
    found, absent = [], []
    for name, update in contenders.items():
        try:
            counts = changed(update, arrays, args.cuts)
        except Exception as error:
            if name == "this":
                raise
            absent.append(missing(name, error))
            print(f"{name}: COULD NOT RUN: {absent[-1]['why']}")
            continue
        for n, (params, any_state) in counts.items():
            found.append(row(name, "changed parameters", "elements", [params], shards=n))
            found.append(row(name, "changed parameters or moments", "elements", [any_state], shards=n))
            print(f"{name:20} {n:4} shards: {params} parameters, {any_state} with moments, of {args.numel:,}")
    record = {
        "bench": "exactness",
        "title": "Bits that change with the shards",
        "config": {"params": args.numel, "steps": steps, "threads": threads, "element type": "float32"},
        "versions": versions("torch", "deepspeed", "numpy"),
        "rows": found,
        "ratios": [],
        "missing": absent,
        "notes": [],
    }
    append(args.json, record)


if __name__ == "__main__":
    main()
