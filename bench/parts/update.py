"""The update kernel against torch, DeepSpeed and NumPy, and against the streaming limit of the same bytes.

AdamW is measured at several sizes, and every rule, with its states in every format, at one (``update_rules``).

Each number of threads has separate processes, so that every library's OpenMP has the same number. Each size that takes
much memory has, too, so that nothing of it remains in the allocator. Small updates go through many sets of buffers in a
row, so that none is in a cache when its turn comes.

The host step makes the parameters of the next forward from the gradients, both bf16: norm, clipping, AdamW in fp32,
cast. torch's host step has a pass for each of these. There is no loss scale, which would take one more pass.
"""

import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.harness.processes import KEEP_FREED_MEMORY
from bench.harness.rounds import interleave, timed
from bench.harness.streaming import READ, UPDATE, WRITE, Traffic, streaming
from bench.parts.update_rules import RULES, measure_rule
from bench.peers import find_compilers
from bench.record import append, missing, parser, ratio, rows, versions
from offload_core.dtypes import BFLOAT16, FLOAT16, FLOAT32, ElementType
from offload_core.memory.host_memory import HostMemory, available_bytes, format_bytes
from offload_core.native import kernels
from offload_core.native.grad_norm import SumOfSquares, clip_coefficient
from offload_core.rules.adam import Adam, AdamHyper
from offload_core.support.processors import available_cpus

_COLD = 20_000_000
"""The least parameters of a turn: 560 MB, more than any cache."""
_SLOW = 100_000_000
"""The parameters above which contenders with a pass for each operation are left out."""
_PEAK_BYTES = 72
"""Bytes a parameter, with all contenders' buffers and torch's temporaries."""
_CLIPPING = 1.0
_HOST_STEP_TENSORS = 24
_RULE, _HYPER = Adam("torch"), AdamHyper(1e-3)

FP32, BF16, FP16 = "this, fp32", "this, bf16 gradient and output", "this, fp16 gradient and output"
SINGLE, FOREACH, FUSED = "torch AdamW, single tensor", "torch AdamW, foreach", "torch AdamW, fused"
DEEPSPEED, DEEPSPEED_BF16 = "DeepSpeedCPUAdam, fp32", "DeepSpeedCPUAdam, bf16 without master weights"
NUMPY = "NumPy"
STREAM, STREAM_BF16 = "streaming limit, fp32", "streaming limit, bf16"
NORM, NORM_BF16 = "norm, fp32", "norm, bf16"
BYTES = {DEEPSPEED_BF16: 22, NORM: 4, NORM_BF16: 2}
"""Bytes that a contender reads and writes for a parameter; the others 28."""
THIS_STEP, SINGLE_STEP, FOREACH_STEP = "this: norm, then update", "torch: clip, single tensor", "torch: clip, foreach"
FUSED_STEP = "torch: clip, fused"

Run = Callable[[], object]


def in_a_row(runs: Sequence[Run]) -> Run:
    def run() -> None:
        for each in runs:
            each()

    return run


class Buffers:
    """The arrays of ``sets`` updates of n elements, in the memory the engine would use."""

    def __init__(self, n: int, threads: int, sets: int = 1) -> None:
        memory = HostMemory(threads)
        rng = np.random.default_rng(0)
        self.n, self.threads = n, threads
        total = n * sets
        self._starts = range(0, total, n)
        self.grads = {t: memory.allocate("grad", total, t.numpy) for t in (FLOAT32, BFLOAT16, FLOAT16)}
        self.grads[FLOAT32][:] = rng.standard_normal(total, dtype=np.float32) * np.float32(1e-3)
        for t in (BFLOAT16, FLOAT16):
            kernels.cast_array(self.grads[FLOAT32], FLOAT32, self.grads[t], t, threads)
        self.states = [memory.allocate("state", total, FLOAT32.numpy) for _ in range(3)]
        self.states[0][:] = self.grads[FLOAT32]
        self.outs = {t: memory.allocate("out", total, t.numpy) for t in (BFLOAT16, FLOAT16)}

    def adam(self, grad: ElementType, out: ElementType | None, instruction_set: str | None = None) -> Run:
        """One AdamW step of each set with clipping's factor, in the engine's call."""
        scalars = np.array([_RULE.scalars(_HYPER, 10, grad_scale=0.5)], kernels.SCALARS)
        runs = [
            partial(
                kernels.update,
                kernels.segments_of([self._segment(grad, out, start, start + self.n)]),
                scalars,
                grad_dtype=grad,
                param_dtype=out,
                rule="adam_torch",
                threads=self.threads,
            )
            for start in self._starts
        ]
        if instruction_set is None:
            return in_a_row(runs)

        def run() -> None:
            before = kernels.kernel_info().instruction_set
            kernels.set_instruction_set(instruction_set)
            in_a_row(runs)()
            kernels.set_instruction_set(before)

        return run

    def _segment(
        self, grad: ElementType, out: ElementType | None, start: int, end: int
    ) -> dict[str, int | Sequence[int]]:
        master, *moments = (kernels.address(state[start:]) for state in self.states)
        return {
            "grad": kernels.address(self.grads[grad][start:]),
            "master": master,
            "moments": moments,
            "param": 0 if out is None else kernels.address(self.outs[out][start:]),
            "numel": end - start,
        }

    def norm(self, grad: ElementType) -> Run:
        """The exact sum of squares of each set's gradient."""
        bins = np.zeros(kernels.NORM_BINS, np.int64)
        source = self.grads[grad]
        return in_a_row(
            [
                partial(
                    kernels.sum_squares,
                    kernels.spans_of([(kernels.address(source[start:]), 0, self.n)]),
                    grad,
                    bins,
                    threads=self.threads,
                )
                for start in self._starts
            ]
        )

    def stream(self, grad: ElementType) -> Run:
        """The streaming limit, of each set."""

        def traffic(start: int) -> Traffic:
            written = [] if grad is FLOAT32 else [(self.outs[grad], WRITE)]
            arrays = [(self.grads[grad], READ), *((state, UPDATE) for state in self.states), *written]
            return [(array[start : start + self.n], mode) for array, mode in arrays]

        return in_a_row([streaming(traffic(start), self.n, self.threads) for start in self._starts])

    def host_step(self) -> Run:
        """Norm, clipping, AdamW and cast of one set, as so many tensors: gradients are read twice."""
        ends = [self.n * i // _HOST_STEP_TENSORS for i in range(_HOST_STEP_TENSORS + 1)]
        tensors = list(itertools.pairwise(ends))
        segments = kernels.segments_of([self._segment(BFLOAT16, BFLOAT16, *tensor) for tensor in tensors])
        source = self.grads[BFLOAT16]
        spans = kernels.spans_of([(kernels.address(source[a:]), 0, b - a) for a, b in tensors])

        def run() -> None:
            norm = SumOfSquares()
            norm.add(spans, BFLOAT16, threads=self.threads)
            scale = clip_coefficient(norm.norm(), _CLIPPING)
            kernels.update(
                segments,
                np.array([_RULE.scalars(_HYPER, 10, grad_scale=scale)], kernels.SCALARS),
                grad_dtype=BFLOAT16,
                param_dtype=BFLOAT16,
                rule="adam_torch",
                threads=self.threads,
            )

        return run


class TorchBuffers:
    """The tensors of ``sets`` updates of n elements, which torch's, DeepSpeed's and NumPy's updates share."""

    def __init__(self, n: int, sets: int) -> None:
        self.params = [torch.nn.Parameter(torch.randn(n) * 1e-3) for _ in range(sets)]
        for param in self.params:
            param.grad = torch.randn(n) * 1e-3
        self.moments = [(torch.zeros(n), torch.zeros(n)) for _ in range(sets)]

    def adamw(self, **options: bool) -> Run:
        return in_a_row([self._step(torch.optim.AdamW([p], lr=_HYPER.lr, **options)) for p in self.params])

    def _step(self, optimizer: torch.optim.Optimizer) -> Run:
        (param,) = optimizer.param_groups[0]["params"]
        (i,) = (i for i, p in enumerate(self.params) if p is param)
        exp_avg, exp_avg_sq = self.moments[i]
        optimizer.state[param] = {"step": torch.tensor(0.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        return optimizer.step

    def deepspeed(self) -> Run:
        return self._deepspeed(self.params)

    def deepspeed_bf16(self) -> Run:
        narrow = [torch.nn.Parameter(param.detach().bfloat16()) for param in self.params]
        for param, wide in zip(narrow, self.params, strict=True):
            param.grad = wide.grad.bfloat16()
        return self._deepspeed(narrow)

    def _deepspeed(self, params: list[torch.nn.Parameter]) -> Run:
        """DeepSpeed's update, with one optimizer for all sets, because making one takes a second."""
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(params, lr=_HYPER.lr, weight_decay=_HYPER.weight_decay)
        for param, (exp_avg, exp_avg_sq) in zip(params, self.moments, strict=True):
            optimizer.state[param] = {"step": 0, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        return optimizer.step

    def numpy(self) -> Run:
        """NumPy's update, in place, with two temporaries that are allocated once."""
        runs = []
        scratch = [np.empty(self.params[0].numel(), np.float32) for _ in range(2)]
        for param, moments in zip(self.params, self.moments, strict=True):
            arrays = [param.detach().numpy(), param.grad.numpy(), *(moment.numpy() for moment in moments)]
            runs.append(partial(numpy_adamw, *arrays, *scratch))
        return in_a_row(runs)


def numpy_adamw(
    param: np.ndarray, grad: np.ndarray, exp_avg: np.ndarray, exp_avg_sq: np.ndarray, a: np.ndarray, b: np.ndarray
) -> None:
    beta1, beta2 = _HYPER.betas
    t = 10
    param *= 1 - _HYPER.lr * _HYPER.weight_decay
    exp_avg += np.multiply(np.subtract(grad, exp_avg, out=a), 1 - beta1, out=a)
    exp_avg_sq *= beta2
    exp_avg_sq += np.multiply(np.multiply(grad, grad, out=a), 1 - beta2, out=a)
    np.sqrt(exp_avg_sq, out=a)
    a /= math.sqrt(1 - beta2**t)
    a += _HYPER.eps
    np.multiply(exp_avg, _HYPER.lr / (1 - beta1**t), out=b)
    param -= np.divide(b, a, out=b)


def torch_host_step(n: int, **options: bool) -> Run:
    """torch's host step, on fp32 masters of bf16 parameters: cast and clip gradients, update, cast parameters."""
    ends = [n * i // _HOST_STEP_TENSORS for i in range(_HOST_STEP_TENSORS + 1)]
    masters = [torch.nn.Parameter(torch.randn(b - a) * 1e-3) for a, b in itertools.pairwise(ends)]
    params = [master.detach().bfloat16() for master in masters]
    grads = [torch.randn_like(param) * 1e-3 for param in params]
    optimizer = torch.optim.AdamW(masters, lr=_HYPER.lr, **options)

    @torch.no_grad()
    def run() -> None:
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float()
        torch.nn.utils.clip_grad_norm_(masters, _CLIPPING)
        optimizer.step()
        for param, master in zip(params, masters, strict=True):
            param.copy_(master)
            master.grad = None

    return run


Measured = dict[str, Any]
"""``{"rows": [...], "ratios": [...], "missing": [...], "notes": [...]}``"""


def per_parameter(contenders: dict[str, Run], params: int, rounds: int) -> dict[str, list[float]]:
    """Return the nanoseconds a parameter of each contender in each round."""
    seconds = interleave({name: timed(run) for name, run in contenders.items()}, rounds, pause=0.02)
    return {name: [s / params * 1e9 for s in values] for name, values in seconds.items()}


def measure_updates(n: int, threads: int, sets: int, rounds: int, ratios: bool) -> Measured:
    buffers, tensors = Buffers(n, threads, sets), TorchBuffers(n, sets)
    contenders = {
        FP32: buffers.adam(FLOAT32, None),
        BF16: buffers.adam(BFLOAT16, BFLOAT16),
        FP16: buffers.adam(FLOAT16, FLOAT16),
        FUSED: tensors.adamw(fused=True),
        STREAM: buffers.stream(FLOAT32),
        STREAM_BF16: buffers.stream(BFLOAT16),
        NORM: buffers.norm(FLOAT32),
        NORM_BF16: buffers.norm(BFLOAT16),
    }
    absent = []
    try:
        contenders |= {DEEPSPEED: tensors.deepspeed(), DEEPSPEED_BF16: tensors.deepspeed_bf16()}
    except Exception as error:  # not installed, or its C++ does not compile here
        absent.append(missing("DeepSpeedCPUAdam", error))
    ns = per_parameter(contenders, n * sets, rounds)
    if n <= _SLOW:
        slow = {SINGLE: tensors.adamw(foreach=False), FOREACH: tensors.adamw(foreach=True), NUMPY: tensors.numpy()}
        ns |= per_parameter(slow, n * sets, max(rounds // 8, 2))
    extra = {"params": n, "threads": threads}
    found = []
    for name, values in ns.items():
        metric = "norm" if name in (NORM, NORM_BF16) else "update"
        found += rows(metric, "ns/param", {name: values}, bytes=BYTES.get(name, 28), **extra)
    compared = []
    if ratios:
        compared = [
            ratio("fp32 update / torch fused", ns[FP32], ns[FUSED], target=1.05),
            ratio("bf16 update / streaming limit", ns[BF16], ns[STREAM_BF16], target=1.10),
            ratio("fp32 norm / fp32 update", ns[NORM], ns[FP32], target=0.6),
        ]
        if DEEPSPEED in ns:
            compared.append(ratio("fp32 update / DeepSpeedCPUAdam", ns[FP32], ns[DEEPSPEED], target=1.05))
    return {"rows": found, "ratios": compared, "missing": absent, "notes": []}


def merge(known: Measured, measured: Measured) -> None:
    """Add the results that ``known`` lacks."""
    for key, values in measured.items():
        known[key] += [value for value in values if value not in known[key]]


def measure_types(n: int, threads: int, sets: int, rounds: int) -> Measured:
    """Measure each element type of gradient and output, on each instruction set."""
    buffers = Buffers(n, threads, sets)
    found = []
    for instruction_set in kernels.kernel_info().supported:
        contenders, n_bytes = {}, {}
        for grad in (FLOAT32, BFLOAT16, FLOAT16):
            for out in (None, BFLOAT16, FLOAT16):
                name = f"{grad.name} gradient, {out.name if out else 'no'} output"
                contenders[name] = buffers.adam(grad, out, instruction_set)
                n_bytes[name] = 24 + grad.itemsize + (out.itemsize if out else 0)
        for name, values in per_parameter(contenders, n * sets, rounds).items():
            extra = {"params": n, "threads": threads, "bytes": n_bytes[name]}
            found += rows("update", "ns/param", {name: values}, **extra, instruction_set=instruction_set)
    return {"rows": found, "ratios": [], "missing": [], "notes": []}


def measure_host_step(n: int, threads: int, rounds: int) -> Measured:
    buffers = Buffers(n, threads)
    contenders = {
        THIS_STEP: buffers.host_step(),
        SINGLE_STEP: torch_host_step(n, foreach=False),
        FOREACH_STEP: torch_host_step(n, foreach=True),
        FUSED_STEP: torch_host_step(n, fused=True),
    }
    ns = per_parameter(contenders, n, rounds)
    compared = [
        ratio(f"host step, {name} / this", ns[name], ns[THIS_STEP], target=target, better="higher")
        for name, target in ((SINGLE_STEP, 5.0), (FOREACH_STEP, 5.0), (FUSED_STEP, None))
    ]
    found = rows("host step", "ns/param", ns, params=n, threads=threads)
    return {"rows": found, "ratios": compared, "missing": [], "notes": []}


def in_processes(threads: int, processes: Sequence[Sequence[Callable[[], Measured]]]) -> Iterator[Measured]:
    """Yield the results of the tasks of each process, which run one after another; all libraries have ``threads``
    threads."""
    os.environ |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", **KEEP_FREED_MEMORY}
    for tasks in processes:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            for task in tasks:
                yield pool.submit(task).result()


def show(measured: Measured) -> None:
    for row in measured["rows"]:
        where = f"{row['params']:>12,}{row['threads']:>3}  {row.get('instruction_set', ''):8}"
        gigabytes = f"{row['bytes'] / row['p50']:7.1f} GB/s" if "bytes" in row else ""
        print(
            f"{where}{row['name']:46} {row['metric']:10}"
            f"{row['p50']:8.3f} ({row['p20']:.3f} to {row['p80']:.3f}) ns/param{gigabytes}"
        )
    for known in measured["ratios"]:
        target = "" if known["target"] is None else f" (target: {known['better']} than {known['target']})"
        print(f"  {known['name']}: {known['p50']:.3f} ({known['p20']:.3f} to {known['p80']:.3f}){target}")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> None:
    options = parser("update", __doc__.splitlines()[0])
    options.add_argument("--numel", type=int, nargs="+", help="parameters (default: 1 M to 1 B, what fits)")
    options.add_argument("--threads", type=int, nargs="+", help="default: 1 and all")
    options.add_argument("--rounds", type=int, help="for ratios (default: 12); else an eighth, at least 2")
    args = options.parse_args(arguments)
    sizes = args.numel or ([10**6, 2 * 10**6] if args.quick else [10**6, 10**7, 10**8, 10**9])
    threads = args.threads or sorted({1, available_cpus()})
    rounds = args.rounds or (2 if args.quick else 12)
    known: Measured = {"rows": [], "ratios": [], "missing": [], "notes": []}
    fitting = [n for n in sizes if n * _PEAK_BYTES <= available_bytes()]
    for n in set(sizes) - set(fitting):
        need, have = format_bytes(n * _PEAK_BYTES), format_bytes(available_bytes())
        known["missing"].append(missing(f"{n:,} parameters", f"all contenders together need {need}, {have} available"))
    if not fitting:
        options.error(f"--numel: {known['missing'][0]['why']}")
    compared = max((n for n in fitting if n <= _SLOW), default=fitting[0])  # the size of the README's ratios
    few = max(rounds // 8, 2)
    find_compilers()
    cold = 10**6 if args.quick else _COLD
    for count in threads:

        def updates(n: int, rounds: int, ratios: bool = False, threads: int = count) -> Callable[[], Measured]:
            return partial(measure_updates, n, threads, max(1, cold // n), rounds, ratios)

        small = [updates(n, few) for n in fitting if n < compared]
        if count < max(threads):
            processes = [small or [updates(compared, few)]]
        else:
            smallest = min(fitting)
            processes = [
                [*small, partial(measure_types, smallest, count, max(1, cold // smallest), few)],
                [updates(compared, rounds, ratios=True), partial(measure_host_step, compared, count, rounds)],
                *([updates(n, few)] for n in fitting if n > compared),
                *([partial(measure_rule, rule, compared, count, rounds)] for rule in RULES),
            ]
        for measured in in_processes(count, processes):
            show(measured)
            merge(known, measured)
    for absent in known["missing"]:
        print(f"{absent['name']}: COULD NOT RUN: {absent['why']}")
    record = {
        "bench": "update",
        "title": "The update on the host",
        "config": {
            "params": fitting,
            "ratios at": compared,
            "threads": threads,
            "rounds": rounds,
            "malloc": KEEP_FREED_MEMORY,
            "instruction sets": list(kernels.kernel_info().supported),
        },
        "versions": versions("torch", "deepspeed", "numpy"),
        **known,
    }
    append(args.json, record)


if __name__ == "__main__":
    main()
