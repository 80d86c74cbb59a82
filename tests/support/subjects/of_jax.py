"""Subjects of JAX: a tree on one device, and over a mesh."""

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from frontends.jax import ScaledGradients, wrap
from frontends.jax.placement import placement
from offload_core.checkpoint.manifest import read_manifest, write_manifest
from offload_core.errors import CheckpointError, GradientError, ParameterError, StateError
from offload_core.support.checkpoint_folder import MANIFEST
from tests.support.checkpoints import Loader
from tests.support.jax_models import replaced
from tests.support.subjects import Call, Run, Wrong, plain

SHAPES: dict[str, Any] = {"w": (8, 8), "layers": [{"v": (8, 16)}, {"b": (16,)}]}


def loss_of(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x.astype(params["w"].dtype) @ params["w"]) @ params["layers"][0]["v"] + params["layers"][1]["b"]
    return jnp.mean(hidden.astype(jnp.float32) ** 2)


gradients_of = jax.jit(jax.grad(loss_of))


def trained(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    is_shape = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: rng.standard_normal(shape, np.float32), SHAPES, is_leaf=is_shape)


def untrained(seed: int) -> dict[str, Any]:
    """One leaf of each other kind."""
    rng = np.random.default_rng(seed)
    return {
        "key": jax.random.split(jax.random.key(seed), 3),
        "rbg": jax.random.key(seed, impl="rbg"),
        "ids": jnp.asarray(rng.integers(0, 99, (2, 3)), jnp.int32),
        "frozen": jnp.asarray(rng.standard_normal((3, 8)), jnp.bfloat16),
        "host": rng.standard_normal(5),  # float64
        "flag": np.bool_(seed % 2),
        "empty": np.zeros((0, 3), np.int8),
        "activation": "tanh",
        "nothing": None,
    }


class Tree(Run):
    """A tree with leaves of all kinds, of which some are trained, on one device or over a mesh.

    Args:
        ranks: devices of the mesh; None: no mesh.
        wait: False has updates return before they have ended.
        own_memory: True takes the device for one whose memory is not the host's.
        donate: True has updates delete gradients, and write parameters over those of before.
    """

    def __init__(
        self,
        seed: int,
        *,
        ranks: int | None = None,
        wait: bool = True,
        own_memory: bool = False,
        donate: bool = False,
        **fields: Any,
    ) -> None:
        self.fields = {"ranks": ranks, "wait": wait, "own_memory": own_memory, "donate": donate, **fields}
        self.donate = donate
        self.wait, self.loader = wait, Loader(seed)
        self.mesh = None if ranks is None else jax.make_mesh((ranks,), ("dp",), devices=jax.devices("cpu")[:ranks])
        tree = {"model": trained(seed), "more": {} if ranks else untrained(seed)}
        given = {"lr": lambda count: 0.1 / (1 + count), "reduce_bucket_size": 64, "num_threads": 1, **fields}
        with pytest.MonkeyPatch.context() as patch:
            if own_memory:
                patch.setattr(placement, "on_cpu", lambda array: False)
            self.offloaded = wrap(tree, **given, mesh=self.mesh, trainable={"model": True, "more": False})
        self.scaled = self.offloaded.value_and_grad(lambda params, x: loss_of(params["model"], x))

    def another(self, steps: int = 3) -> "Tree":
        made = type(self)(5, **self.fields)
        for number in range(11, 11 + steps):
            made.step(number)
        return made

    def gradients(self, number: int | None = None) -> Any:
        """The gradients of a tree, which ``update`` takes."""
        if number is not None:
            random.seed(number)
            np.random.seed(number)
        x = np.random.standard_normal((4, 8)).astype(np.float32) + np.float32(random.random())
        params = self.offloaded.params
        if self.fields.get("param_dtype") == "float16":
            return self.scaled(params, x)[1]
        if self.mesh is not None:
            x = jax.device_put(x, NamedSharding(self.mesh, P()))
        nothing = jax.tree.map(lambda leaf: None, params["more"])
        return {"model": gradients_of(params["model"], x), "more": nothing}

    def step(self, number: int | None = None) -> None:
        for micro_step in range(self.fields.get("gradient_accumulation_steps", 1)):
            gradients = self.gradients(None if number is None else 100 * number + micro_step)
            self.offloaded.update(gradients, wait=self.wait, donate=self.donate, donate_params=self.donate)
        self.loader.at += 1

    def values(self) -> dict[str, Any]:
        params = plain(jax.tree.leaves(self.offloaded.flush()))
        saved = jax.tree_util.tree_leaves_with_path(self.offloaded.to_pytree())
        found = {jax.tree_util.keystr(path): plain(leaf) for path, leaf in saved}
        return {"params": params, **found, "updates": self.offloaded.count}

    def everything(self) -> dict[str, Any]:
        return super().everything() | {"loader": self.loader.at}

    def forget(self) -> None:
        self.offloaded.discard_gradients()

    def save(self, folder: Path, **arguments: Any) -> Path:
        extras = {"key": jax.random.key(3)}
        return self.offloaded.save_checkpoint(folder, stateful={"loader": self.loader}, extras=extras, **arguments)

    def load(self, folder: Path) -> None:
        found = self.offloaded.load_checkpoint(folder, stateful={"loader": self.loader})
        assert jax.random.bits(found["key"]) == jax.random.bits(jax.random.key(3))

    def rest(self) -> Any:
        return copy.deepcopy([self.loader.at, random.getstate(), np.random.get_state()])

    def take_rest(self, rest: Any) -> None:
        self.loader.at, states, numpys = rest
        random.setstate(states)
        np.random.set_state(numpys)

    @staticmethod
    def by_checkpoint(run: "Tree", begin: Any, folder: Path, go_on: Callable[[], None], *, wait: bool) -> "Tree":
        run.save(folder, wait=wait)
        go_on()
        other = begin(1)
        for _ in range(3):
            other.step()
        run.offloaded.wait_for_checkpoint()
        other.load(folder)
        return other

    @staticmethod
    def by_tree(run: "Tree", begin: Any, folder: Path, go_on: Callable[[], None]) -> "Tree":
        kept, rest = run.offloaded.to_pytree(), run.rest()
        go_on()
        other = begin(1)
        other.offloaded.load_pytree(kept)
        other.take_rest(rest)
        return other

    @staticmethod
    def by_optax(run: "Tree", begin: Any, folder: Path, go_on: Callable[[], None]) -> "Tree":
        params, kept, rest = run.offloaded.params, run.offloaded.to_optax_state(), run.rest()
        go_on()
        other = begin(1)
        other.offloaded.load_params(params)
        other.offloaded.load_optax_state(kept)
        other.take_rest(rest)
        return other


def given(run: Tree, folder: Path) -> None:
    """Another run's states, of each kind."""
    other = run.another()
    offloaded = other.offloaded
    run.given = {"pytree": offloaded.to_pytree(), "params": offloaded.params, "optax_state": offloaded.to_optax_state()}


def updates_with(spoil: Callable[[Any], Any], match: str) -> Wrong:
    """An update with wrong gradients."""

    def prepare(run: Tree, folder: Path) -> None:
        found = run.gradients(20)
        run.given = (
            ScaledGradients(spoil(found.tree), found.scale) if isinstance(found, ScaledGradients) else spoil(found)
        )

    return Wrong(lambda run, folder: run.offloaded.update(run.given), GradientError, match, prepare)


def model(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda gradients: {**gradients, "model": change(gradients["model"])}


def donated(gradients: Any) -> Any:
    gradients["model"]["w"].delete()
    return gradients


W = r"\['model'\]\['w'\]"
GRADIENTS = {
    f"gradients: {name}": updates_with(spoil, match)
    for name, spoil, match in (
        ("another shape", model(lambda g: {**g, "w": g["w"][:4]}), rf"{W}.*\[4, 8\].*expected \w+\[8, 8\]"),
        ("one element", model(lambda g: {**g, "w": jnp.ones(())}), rf"{W}.*\[\]"),
        ("another type", model(lambda g: {**g, "w": g["w"].astype(jnp.float8_e5m2)}), rf"{W}.*float8_e5m2\[8, 8\]"),
        ("integers", model(lambda g: {**g, "w": np.ones((8, 8), int)}), rf"{W}.*int64\[8, 8\]"),
        ("complex", model(lambda g: {**g, "w": g["w"].astype(jnp.complex64)}), rf"{W}.*complex64"),
        ("a number", model(lambda g: {**g, "w": 1.0}), rf"{W}.*a float, expected an array or None"),
        ("a leaf less", model(lambda g: {"w": g["w"]}), r"update: gradients.*\['w'\]"),
        ("a leaf more", model(lambda g: {**g, "z": g["w"]}), r"has \['model'\]\['z'\] where"),
        ("one array", lambda g: g["model"]["w"], "update: gradients"),
        ("only None", lambda g: jax.tree.map(lambda _: None, g), "every gradient is None"),
        ("nothing", lambda g: None, "update: gradients"),
        ("donated", donated, rf"{W}.*donated or deleted"),
    )
}
SCALED = {
    "gradients: scaled": Wrong(
        lambda run, folder: run.offloaded.update(ScaledGradients(run.given, 3.0)),
        GradientError,
        "scaled by 3, expected",
        lambda run, folder: run.__dict__.update(given=getattr(found := run.gradients(20), "tree", found)),
    ),
}
PLAIN = {
    "gradients: plain under loss scaling": Wrong(
        lambda run, folder: run.offloaded.update(run.given),
        GradientError,
        "plain gradients under loss scaling.*offloaded.value_and_grad",
        lambda run, folder: run.__dict__.update(given=run.gradients(20).tree),
    ),
}


def loads(spoil: Callable[[dict[str, Any]], object], match: str | None = None) -> Wrong:
    """A tree of states that was changed."""

    def prepare(run: Tree, folder: Path) -> None:
        given(run, folder)
        run.given = copy.copy(run.given["pytree"])
        changed = spoil(run.given)
        run.given = changed if isinstance(changed, dict) and "master" in changed else run.given

    return Wrong(lambda run, folder: run.offloaded.load_pytree(run.given), StateError, match or "load_pytree", prepare)


def at(path: str, value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda tree: replaced(tree, path, value)


TREES = {
    "tree: no moment": loads(lambda s: s.pop("exp_avg"), "no 'exp_avg'.*expected what to_pytree"),
    "tree: no count": loads(lambda s: s.pop("count"), "no 'count'"),
    **{
        f"tree: {name}": loads(at(path, value), match)
        for name, path, value, match in (
            ("another shape", "['master']['model']['w']", lambda a: a[:4], r"is \[4, 8\].*\[8, 8\]"),
            ("a scalar", "['params']['model']['w']", lambda a: np.float32(1), r"is \[\], expected shape \[8, 8\]"),
            ("steps of two", "['steps']['model']['w']", lambda a: np.ones(2), r"is \[2\], expected shape \[\]"),
            ("a negative step", "['steps']['model']['w']", lambda a: np.float32(-1), None),
            ("a step that is NaN", "['steps']['model']['w']", lambda a: np.float32(np.nan), None),
            ("a negative count", "['count']", lambda a: -3, None),
            ("half a count", "['count']", lambda a: 0.5, None),
            ("float64 moments", "['exp_avg']['model']['w']", lambda a: np.asarray(a, np.float64), None),
            ("integers", "['master']['model']['w']", lambda a: np.zeros(a.shape, np.int32), None),
        )
    },
}
TREES_OF_SCALES = {
    "tree: a scale that is NaN": loads(at("['loss_scale']['scale']", lambda a: np.nan)),
    "tree: a negative count of steps": loads(at("['loss_scale']['good_steps']", lambda a: -1)),
}


def optax_state(spoil: Callable[[Any], Any]) -> Wrong:
    def act(run: Tree, folder: Path) -> None:
        adam, *others = run.given["optax_state"]
        run.offloaded.load_optax_state((spoil(adam), *others))

    return Wrong(act, StateError, "load_optax_state", given)


OPTAX = {
    "optax: a negative count": optax_state(lambda adam: adam._replace(count=np.int32(-1))),
    "optax: float64": optax_state(
        lambda adam: adam._replace(mu=jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), adam.mu))
    ),
}


def forged(change: Callable[[dict[str, Any]], object]) -> Wrong:
    """The load of a checkpoint of another run, whose manifest was changed."""

    def prepare(run: Tree, folder: Path) -> None:
        path = run.another().save(folder)
        content = read_manifest(path / MANIFEST)
        change(content)
        write_manifest(path, content)

    return Wrong(lambda run, folder: run.load(folder), CheckpointError, None, prepare)


def of_another_tree(run: Tree, folder: Path) -> None:
    wrap({"model": {"w": jnp.ones((9, 8))}}).save_checkpoint(folder)


CHECKPOINTS = {
    "checkpoint: no extras": forged(lambda c: c["state"].pop("extras")),
    "checkpoint: no updates": forged(lambda c: c["state"].pop("updates")),
    "checkpoint: negative updates": forged(lambda c: c["state"].update(updates=-1)),
    "checkpoint: an object's state missing": forged(lambda c: c["state"]["stateful"].pop("loader")),
    "checkpoint: no random state": forged(lambda c: c["own"][0].pop("random")),
    "checkpoint: the random state of no generator": forged(lambda c: c["own"][0]["random"].update(python=3)),
    "checkpoint: a key of a wrong shape": forged(lambda c: c["state"]["extras"]["key"].update({"$": "jax key rbg"})),
    "checkpoint: another tree's": Wrong(
        lambda run, folder: run.offloaded.load_checkpoint(folder),
        CheckpointError,
        "a checkpoint of another model; it lacks 'model.layers.0.v'",
        of_another_tree,
    ),
    "a save of a function": Wrong(
        lambda run, folder: run.offloaded.save_checkpoint(folder, extras={"f": given}),
        CheckpointError,
        r"state\['extras'\]\['f'\] is a builtins.function",
    ),
}
UNDER_JIT = {
    f"under jit: {name}": Wrong(
        lambda run, folder, act=act: jax.jit(lambda x: act(run, folder) and x)(1.0), error, match
    )
    for name, act, error, match in (
        ("params", lambda run, folder: run.offloaded.params, StateError, "under jit"),
        ("flush", lambda run, folder: run.offloaded.flush(), StateError, "under jit"),
        ("save_checkpoint", lambda run, folder: run.offloaded.save_checkpoint(folder), StateError, "under jit"),
        ("load_checkpoint", lambda run, folder: run.offloaded.load_checkpoint(folder), StateError, "under jit"),
    )
} | {
    "update under jit": Wrong(
        lambda run, folder: jax.jit(lambda x: run.offloaded.update(run.given)["model"]["w"] + x)(1.0),
        (StateError, GradientError),
        "under jit|outside",
        lambda run, folder: run.__dict__.update(given=run.gradients(20)),
    ),
    "value_and_grad of other parameters": Wrong(
        lambda run, folder: run.offloaded.value_and_grad(lambda p: p["model"]["w"].sum())({"model": 1}),
        ParameterError,
        "value_and_grad: params",
    ),
    "value_and_grad of no scalar": Wrong(
        lambda run, folder: run.offloaded.value_and_grad(lambda p: p["model"]["w"])(run.offloaded.params),
        TypeError,
        "scalar",
    ),
}


def saved_and_loaded(run: Tree, folder: Path) -> Any:
    run.save(folder)
    other = run.another(0)
    other.load(folder)
    return other.values()


def exported(run: Tree, folder: Path) -> Any:
    run.offloaded.export_safetensors(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load_call(name: str) -> Call:
    return Call(lambda run, folder: getattr(run.offloaded, f"load_{name}")(run.given[name]), given)


def saved_by_another(run: Tree, folder: Path) -> None:
    run.another().save(folder / "given")


Tree.resumes = {
    "a checkpoint": partial(Tree.by_checkpoint, wait=True),
    "a checkpoint that is written meanwhile": partial(Tree.by_checkpoint, wait=False),
    "a tree": Tree.by_tree,
    "optax's state": Tree.by_optax,
}
Tree.wrong = {
    **GRADIENTS, **SCALED, **PLAIN, **TREES, **TREES_OF_SCALES, **OPTAX, **CHECKPOINTS, **UNDER_JIT
}  # fmt: skip
Tree.reads = {
    "params": lambda run, folder: run.offloaded.params,
    "count": lambda run, folder: run.offloaded.count,
    "report": lambda run, folder: run.offloaded.report,
    "flush": lambda run, folder: run.offloaded.flush(),
    "to_pytree": lambda run, folder: run.offloaded.to_pytree(),
    "to_optax_state": lambda run, folder: run.offloaded.to_optax_state(),
    "memory_report": lambda run, folder: repr(run.offloaded.memory_report()),
    "discard_gradients": lambda run, folder: run.offloaded.discard_gradients(),
    "a checkpoint": saved_and_loaded,
    "export_safetensors": exported,
    "a forward": lambda run, folder: loss_of(run.offloaded.params["model"], np.ones((4, 8), np.float32)),
}
Tree.calls = {
    "update": Call(lambda run, folder: run.step(2)),
    "flush": Call(lambda run, folder: run.offloaded.flush()),
    "load_pytree": load_call("pytree"),
    "load_params": load_call("params"),
    "load_optax_state": load_call("optax_state"),
    "to_pytree": Call(lambda run, folder: run.offloaded.to_pytree()),
    "save_checkpoint": Call(lambda run, folder: run.save(folder / "saved")),
    "export_safetensors": Call(lambda run, folder: run.offloaded.export_safetensors(folder / "exported")),
    "load_checkpoint": Call(
        lambda run, folder: run.load(folder / "given"), saved_by_another, lambda run, folder: run.load(folder / "given")
    ),
}
Tree.peeks = {
    "params": lambda run: run.offloaded.params,
    "to_pytree": lambda run: {**run.offloaded.to_pytree(), "count": run.offloaded.count},
}
Tree.peeked = ("update", "load_pytree", "load_params", "load_optax_state")
