"""Training over meshes: our optimizers beside torch's on the local shards, and beside one process with whole tensors.

Each reference trains a copy of the model. It computes its update another way and writes the copy's local shards, so
that both copies go on to the same gradients.
"""

import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from frontends.torch import OffloadedAdamW, wrap
from tests.support.meshes import Sharded, local, local_gradient, places, whole
from tests.support.torch_models import same_bits

STEPS, LR, DECAY = 20, 1e-2, 0.1
MOMENTS = ("exp_avg", "exp_avg_sq")


class TorchsOnLocals:
    """``torch.optim.AdamW(fused=True)`` on this rank's parts: plain tensors over the same memory."""

    def __init__(self, model: nn.Module, *, lr: float = LR, weight_decay: float = DECAY) -> None:
        self._parts = {p: nn.Parameter(local(p)) for p in model.parameters()}
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._adam = torch.optim.AdamW(self._parts.values(), lr=lr, weight_decay=weight_decay, fused=True)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def take(self) -> None:
        """Add the gradients of a micro-step, laid out as their parameters, to the sums; ``p.grad`` is free again."""
        for p in self._parts:
            if (grad := local_gradient(p)) is not None:
                self._sums[p] = self._sums[p] + grad if p in self._sums else grad
            p.grad = None

    def step(self) -> None:
        """Update, unless a gradient of any rank is not finite."""
        self.take()
        finite = torch.tensor(all(bool(grad.isfinite().all()) for grad in self._sums.values()))
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        for p, part in self._parts.items():
            part.grad = self._sums.get(p)
        if finite:
            self._adam.step()
        self._sums.clear()

    def expected(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's parts of the parameter and its states."""
        part = self._parts[param]
        return {"master": part.detach(), **self._adam.state.get(part, {})}


class OneProcess:
    """One process's own optimizer of plain tensors, given the whole gradients."""

    def __init__(self, model: nn.Module, *, lr: float = LR, weight_decay: float = DECAY, **fields: Any) -> None:
        self._wholes = {p: nn.Parameter(whole(p)) for p in model.parameters()}
        self._places = {p: places(p) for p in self._wholes}
        self._optimizer = OffloadedAdamW(self._wholes.values(), lr=lr, weight_decay=weight_decay, **fields)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        for p, of_whole in self._wholes.items():
            of_whole.grad = None if p.grad is None else whole(p.grad)
            p.grad = None
        self._optimizer.step()
        self._optimizer.flush()
        for p, of_whole in self._wholes.items():
            local(p).copy_(self._part(p, of_whole))

    @property
    def report(self) -> Any:
        return self._optimizer.report

    def expected(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        of_whole = self._wholes[param]
        states = self._optimizer.state[of_whole]
        found = {name: self._part(param, states[name]) for name in MOMENTS}
        return {**found, "step": states["step"], "master": self._part(param, states.get("master", of_whole))}

    def _part(self, param: torch.Tensor, of_whole: torch.Tensor) -> torch.Tensor:
        return of_whole.detach().flatten()[self._places[param]].reshape(local(param).shape)


@dataclass
class Ours:
    """One of the ways to our optimizer.

    Args:
        way: ``"plain"``, ``"early"`` or ``"wrap"``.
        fields: of ``OffloadConfig``.
    """

    model: nn.Module
    way: str
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fields = {"lr": LR, "weight_decay": DECAY, "reduce_bucket_size": 9_000, **self.fields}
        self.engine = wrap(self.model, **fields) if self.way == "wrap" else None
        if self.engine is None:
            self.optimizer: Any = OffloadedAdamW(self.model.parameters(), early_copy=self.way == "early", **fields)
        else:
            self.optimizer = self.engine.optimizer

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward() if self.engine is None else self.engine.backward(loss)

    def step(self) -> None:
        run = self.optimizer if self.engine is None else self.engine
        run.step()
        run.zero_grad()

    @property
    def report(self) -> Any:
        return self.optimizer.report

    def found(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """As a reference's ``expected``, of the optimizer's states."""
        states = self.optimizer.state.get(param, {})
        if not param.requires_grad:
            assert not states
            return {"master": local(param)}
        for name in MOMENTS:
            assert states[name].device.type == "cpu", name
            if isinstance(param, DTensor):
                assert isinstance(states[name], DTensor), (name, type(states[name]))
                laid = states[name].placements, states[name].device_mesh, states[name].shape
                assert laid == (param.placements, param.device_mesh, param.shape), name
        found = {name: local(states[name]) for name in MOMENTS}
        return {**found, "step": states["step"], "master": local(states.get("master", param))}

    def close(self) -> None:
        self.optimizer.close()


WAYS = ("plain", "early", "wrap")


class Torchs:
    """torch's own fused AdamW on the parameters as they are, with the face of :class:`Ours`: what the references and
    comparisons are themselves tested with. It has an optimizer for each parameter: one takes tensors of one mesh."""

    report = None

    def __init__(self, model: nn.Module, *, lr: float = LR, weight_decay: float = DECAY) -> None:
        self.model = model
        options = {"lr": lr, "weight_decay": weight_decay, "fused": True}
        self.optimizers = {p: torch.optim.AdamW([p], **options) for p in model.parameters()}

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        for each in self.optimizers.values():
            each.step()
            each.zero_grad()

    def found(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.optimizers[param].state[param]
        found = {name: local(states[name]) for name in MOMENTS}
        return {**found, "step": local(states["step"]), "master": local(param)}

    def close(self) -> None:
        pass


def assert_same(ours: Any, reference: Any, other: nn.Module) -> None:
    """Compare what this rank holds of parameters and states bit for bit. All ranks must call this, and all fail."""
    wrong = []
    for (name, p), q in zip(ours.model.named_parameters(), other.parameters(), strict=True):
        expected, found = reference.expected(q), ours.found(p)
        for key, value in expected.items():
            if key == "step":
                same = float(found[key]) == float(value)
            else:
                same = same_bits(found[key], value)
            wrong += [] if same else [f"{key} of {name}"]
        wrong += [] if same_bits(local(p), local(q)) else [name]
    together([f"{', '.join(wrong[:6])} differ ({len(wrong)})"] if wrong else [])


def together(wrong: list[str]) -> None:
    """Raise on all ranks what any rank found wrong."""
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, wrong)
    found = [f"rank {rank}: {'; '.join(each)}" for rank, each in enumerate(of_all) if each]
    assert not found, "; ".join(found)


def beside(
    how: Sharded,
    way: str | Callable[[nn.Module], Any],
    reference: Callable[..., Any],
    steps: int = STEPS,
    *,
    clipping: float | None = None,
    look: int = 2,
    **fields: Any,
) -> list[Any]:
    """Train our optimizer beside a reference; return the reports of its steps.

    Args:
        way: one of :data:`WAYS`, or what makes a run of a model.
        clipping: the bound on the norm, of both.
        look: they are compared at each such step and at the last one. Between these, forwards meet updates in flight.
        fields: of ours alone.
    """
    model, other = how.make(), how.make()
    common = {} if clipping is None else {"gradient_clipping": clipping}
    ours = way(model) if callable(way) else Ours(model, way, {**common, **fields})
    theirs = reference(other, **common)
    reports = []
    for seed in range(steps):
        for run, of_run in ((ours, model), (theirs, other)):
            run.backward(of_run.loss(seed))
            run.step()
        reports.append(ours.report)
        if clipping is not None:
            mine, expected = ours.report, theirs.report
            told = [(r.grad_norm, r.clip_coefficient, r.updated, r.skipped) for r in (mine, expected)]
            together([] if told[0] == told[1] else [f"step {seed}: {told[0]} for {told[1]}"])
        if seed % look == look - 1 or seed == steps - 1:
            with said(f"step {seed}"):
                assert_same(ours, theirs, other)
    ours.close()
    return reports


@contextmanager
def said(where: str) -> Any:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from error


def each(cases: Iterable[tuple[str, Callable[[], Any]]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Run cases that have names; return their results, and the errors of those that failed on all ranks."""
    results, errors = {}, {}
    for name, run in cases:
        try:
            results[name] = run()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            errors[name] = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    return results, errors


def every_sum(cases: Iterable[tuple[Sharded, str, dict[str, Any]]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Run :func:`accumulated` with each of these arguments, as :func:`each` does."""
    return each((f"{how}, {way}, {fields}", partial(accumulated, how, way, **fields)) for how, way, fields in cases)


def no_errors(found: Sequence[tuple[dict[str, Any], dict[str, str]]]) -> list[dict[str, Any]]:
    """The results of ranks that ran :func:`each`."""
    errors = {f"rank {rank}, {name}": said for rank, (_, of_one) in enumerate(found) for name, said in of_one.items()}
    assert not errors, "\n".join(f"{name}: {said}" for name, said in errors.items())
    return [results for results, _ in found]


def accumulated(
    how: Sharded, way: str, *, steps: int = 4, deferred: bool = False, own: bool = False, kept: bool = False
) -> None:
    """Train beside torch's on the local shards, with two micro-steps an update.

    Args:
        deferred: FSDP2 itself sums the gradients of both, and reduces once.
        own: ``gradient_accumulation_steps=2``.
        kept: FSDP2 keeps gathered parameters in their modules from the first micro-step to the second.
    """
    model, other = how.make(), how.make()
    ours, theirs = Ours(model, way, {"gradient_accumulation_steps": 2} if own else {}), TorchsOnLocals(other)
    for step in range(steps):
        for i in range(2):
            for run, of_run in ((ours, model), (theirs, other)):
                if deferred:
                    of_run.set_requires_gradient_sync(i == 1)
                if kept:
                    of_run.set_reshard_after_backward(i == 1)
                loss = of_run.loss(2 * step + i)
                run.backward(loss if own and run is ours else loss / 2)
            if way != "plain" and not deferred:  # torch's own p.grad may sum Partial gradients before they are reduced
                theirs.take()
            if own or i == 1:
                ours.step()
        theirs.step()
        with said(f"step {step}"):
            assert_same(ours, theirs, other)
    ours.close()


def skipping(how: Sharded, way: str, fields: dict[str, Any], spoiler: int, steps: int = 4) -> list[Any]:
    """Train beside torch's on the local shards, with an infinity in the second step on one rank. Return the words of
    the reports."""
    model, other = how.make(), how.make()
    ours, theirs = Ours(model, way, fields), TorchsOnLocals(other)
    told = []
    for step in range(steps):
        for run, of_run in ((ours, model), (theirs, other)):
            with spoiled(of_run, step == 1 and dist.get_rank() == spoiler):
                run.backward(of_run.loss(step))
            run.step()
        told.append((ours.report.updated, ours.report.skipped, ours.report.loss_scale, ours.report.clip_coefficient))
        with said(f"step {step}"):
            assert_same(ours, theirs, other)
    ours.close()
    return told


SCALED = {"loss_scale": "dynamic", "initial_loss_scale": 2.0**10}
"""Powers of two: a scaled run has the bits of one that is not."""
HALVED = (2.0**10, 2.0**10, 2.0**9, 2.0**9)
"""The loss scales of four steps, of which the second overflowed."""
HIGH = {"gradient_clipping": 1e6}
"""Clips nothing, and has gradients examined."""


def assert_skipped_once(results: Sequence[dict[str, Any]], why: str, scales: Sequence[float]) -> None:
    """All ranks skipped the second of four steps, for this reason."""
    assert all(each == results[0] for each in results)
    for name, told in results[0].items():
        updated, skipped, scale, clip = zip(*told, strict=True)
        assert updated == (True, False, True, True), name
        assert skipped == (None, why, None, None), name
        assert scale == tuple(scales), name
        assert set(clip) == {1.0}, name


CLIP = 1.04
"""Some steps of the models of ``meshes.py`` are clipped by it, and some are not."""


def compared(
    cases: Iterable[tuple[Sharded, Any]], steps: int, reference: Any = TorchsOnLocals, **options: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run :func:`beside` with each model and way, as :func:`each` does."""
    return each((f"{how}, {way}", partial(beside, how, way, reference, steps, **options)) for how, way in cases)


def clipped(cases: Iterable[tuple[Sharded, Any]], steps: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Norms and coefficients of clipped runs beside one process."""
    results, errors = compared(cases, steps, OneProcess, clipping=CLIP)
    return {n: [(r.grad_norm, r.clip_coefficient) for r in reports] for n, reports in results.items()}, errors


def assert_some_clipped(results: Sequence[dict[str, Any]]) -> None:
    """All ranks have the same norms and coefficients, and some of these are less than 1."""
    assert all(each == results[0] for each in results)
    for name, steps in results[0].items():
        assert any(coefficient < 1 for _, coefficient in steps), name


@contextmanager
def spoiled(model: nn.Module, spoil: bool) -> Any:
    """One element of the gradient of the embedding's output is infinite, on a rank that spoils it.

    Only the ranks that own the embedding of that token then have an infinity.
    """

    def infinite(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.flatten()[:1] = float("inf")
        return grad

    def on_output(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if spoil:
            output.register_hook(infinite)

    hook = embedding_of(model).register_forward_hook(on_output)
    try:
        yield
    finally:
        hook.remove()


def embedding_of(model: nn.Module) -> nn.Module:
    return (model.model if hasattr(model, "model") else model).embed_tokens
