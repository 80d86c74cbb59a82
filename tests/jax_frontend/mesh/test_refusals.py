"""Refused calls, which change nothing."""

import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from frontends.jax import RankGradients, wrap
from frontends.jax.tree import memory_kinds
from offload_core.errors import CollectiveError, ConfigError, GradientError, ParameterError, StateError
from tests.support import jax_stage3 as stage3
from tests.support.jax_meshes import (
    HYPER,
    assert_same_tree,
    batch_of,
    mesh_of,
    processes,
    refuses,
    replicated,
    split,
)
from tests.support.jax_stage2 import loss_fn, tree_of
from tests.support.jax_stage3 import STAGE3, W, gradients_of


def test_wrong_meshes_and_axes_are_refused():
    params = {"w": np.ones(4, np.float32)}
    two = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    for arguments, words in (
        ({"mesh": mesh_of(4), "axis": "data"}, ["axis: got 'data'", "'dp'"]),
        ({"mesh": two}, ["axis: got None", "'dp', 'tp'"]),
        ({"mesh": two, "axis": "dp"}, ["'tp' of size 4", "expected size 1"]),
        ({"mesh": two.abstract_mesh, "axis": "dp"}, ["AbstractMesh", "expected a jax.sharding.Mesh"]),
        ({"axis": "dp"}, ["no mesh"]),
    ):
        with refuses(ConfigError, *words):
            wrap(params, **arguments)


def test_a_batch_that_is_not_split_is_refused():
    mesh = mesh_of(4)
    offloaded = wrap(tree_of(0), mesh=mesh)
    value_and_grad = offloaded.value_and_grad(loss_fn)
    words = [
        "no argument is split over the mesh axis 'dp'",
        "float32[24, 33]",
        "jax.device_put(batch",
        "in_specs=P('dp')",
    ]
    for batch in (batch_of(0), jnp.asarray(batch_of(0)), replicated(batch_of(0), mesh)):
        with refuses(ParameterError, *words):
            value_and_grad(offloaded.params, batch)
    unknown = "value_and_grad under jit", "'dp' is not known", "outside jit", "already compiled", "in_specs=P('dp')"
    for batch in (batch_of(0), split(batch_of(0), mesh)):
        with refuses(StateError, *unknown):
            jax.jit(value_and_grad)(offloaded.params, batch)
    with refuses(ConfigError, "in_specs", "1 arguments after the parameters"):
        offloaded.value_and_grad(loss_fn, in_specs=(P("dp"), P()))(offloaded.params, batch_of(0))
    with refuses(ConfigError, "in_specs without a mesh"):
        wrap(tree_of(0)).value_and_grad(loss_fn, in_specs=P("dp"))


def test_gradients_that_do_not_fit_change_nothing():
    mesh = mesh_of(4)
    offloaded, twin = (
        wrap(tree_of(0), **HYPER, mesh=mesh, param_dtype="bfloat16", gradient_accumulation_steps=2) for _ in range(2)
    )
    good = RankGradients(split(tree_of(1, jnp.bfloat16, (4,)), mesh))
    for one in (offloaded, twin):
        one.update(good)
    wrong = {
        "expected bfloat16[4, 33, 17]": RankGradients(split(tree_of(1, jnp.bfloat16, (8,)), mesh_of(8))),
        "expected bfloat16[33, 17]": good.tree,
        "float32, expected bfloat16": RankGradients(split(tree_of(1, np.float32, (4,)), mesh)),
        "the tree has": RankGradients({"w": good.tree["embed"]}),
        "every gradient is None": RankGradients(jax.tree.map(lambda _: None, tree_of(0))),
    }
    for words, grads in wrong.items():
        with refuses(GradientError, words):
            offloaded.update(grads)
    with refuses(GradientError, "RankGradients without a mesh"):
        one = wrap({"w": np.ones(3, np.float32)})
        one.update(RankGradients({"w": np.ones((1, 3), np.float32)}))
    for one in (offloaded, twin):
        one.update(good)
    assert offloaded.report.updated
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@processes(2)
def test_gradients_of_processes_that_differ_are_refused_in_all():
    """Their programs would be different ones, and wait for each other for ever."""
    mesh = mesh_of(4)
    first = jax.process_index() == 0
    offloaded, twin = (
        wrap(tree_of(0), **HYPER, mesh=mesh, param_dtype="bfloat16", gradient_accumulation_steps=2) for _ in range(2)
    )
    good = RankGradients(split(tree_of(1, jnp.bfloat16, (4,)), mesh))
    plain = tree_of(2, jnp.bfloat16)

    def but(tree, leaf, value):
        return {**tree, "layers": [{**tree["layers"][0], leaf: value}]}

    wide = plain["layers"][0]["w"].astype(np.float32)
    cases = (
        (
            but(good.tree, "b", None),
            ["['layers'][0]['b']: 1 of 2 processes gave", "zeros", "gave one" if first else "gave none"],
        ),
        (jax.tree.map(lambda _: None, good.tree), ["['embed']: 1 of 2 processes gave"]),
        (but(good.tree, "b", "x"), ["1 of 2 processes raised" if first else "gradient is a str"]),
        ({"w": 1}, ["1 of 2 processes raised" if first else "the tree has"]),
    )
    for one in (offloaded, twin):
        one.update(good)
    for tree, words in cases:
        with refuses(GradientError, *words):
            offloaded.update(good if first else RankGradients(tree))
    with refuses(GradientError, "1 of 2 processes gave RankGradients"):
        offloaded.update(good if first else plain)
    with refuses(GradientError, "['layers'][0]['w']: 1 of 2", "not bfloat16", "float32" if first else "bfloat16"):
        offloaded.update(but(plain, "w", wide) if first else plain)
    for one in (offloaded, twin):
        one.update(good)
    assert offloaded.report.updated
    assert_same_tree(offloaded.to_pytree(), twin.to_pytree())


@processes(2)
def test_a_process_whose_peer_does_not_come_names_the_exchange(folder):
    offloaded = wrap(tree_of(0), **HYPER, mesh=mesh_of(4))
    gradients, said = RankGradients(split(tree_of(1, stack=(4,)), mesh_of(4))), []
    came = folder / "may come"

    def ask():
        while "has waited" not in (lines := offloaded.where()):
            time.sleep(0.001)
        said.append(lines)
        came.touch()

    asking = threading.Thread(target=ask)
    if first := jax.process_index() == 0:
        asking.start()
    while not (first or came.exists()):
        time.sleep(0.001)
    offloaded.update(gradients)
    if first:
        asking.join()
        assert re.search(r"^  exchange: number \d+, '.+' has waited for the other ranks for", said[0], re.MULTILINE)
    assert re.search(r"^  last exchange: number \d+, 'bucket 0: .*' ended", offloaded.where(), re.MULTILINE)


def test_a_rank_lost_in_mid_update_is_an_error_whatever_the_pipeline_refuses_then():
    offloaded = wrap(tree_of(0), **HYPER, mesh=mesh_of(4), reduce_bucket_size=100)
    pipeline = offloaded._core._pipeline
    device, before = pipeline.device, offloaded.params
    gather, calls = device._gather, []

    def lost(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise ValueError("UNKNOWN: connection closed by peer")
        return gather(*arguments)

    def refuse(params=None):
        raise StateError("a rank was lost")

    device._gather, pipeline.gradients.drop = lost, refuse
    with refuses(CollectiveError, "gathering of parameters", "connection closed by peer"):
        offloaded.update(RankGradients(split(tree_of(1, stack=(4,)), mesh_of(4))))
    assert (offloaded.count, len(calls)) == (1, 3)  # an update that broke off is counted, as its steps are
    assert all(a is b for a, b in zip(jax.tree.leaves(offloaded.params), jax.tree.leaves(before), strict=True))

    pipeline.last_step.finish = refuse  # as a pipeline that goes on no more
    for use in (lambda: offloaded.update(tree_of(1)), offloaded.discard_gradients, offloaded.to_pytree):
        with refuses(StateError, "a rank was lost"):
            use()


def test_a_state_that_does_not_fit_is_refused():
    offloaded = wrap(tree_of(0), mesh=mesh_of(4))
    saved = offloaded.to_pytree()
    saved["exp_avg"]["embed"] = saved["exp_avg"]["embed"][:-1]
    with refuses(StateError, "exp_avg['embed'] is [32, 17], expected shape [33, 17]"):
        offloaded.load_pytree(saved)


# --- of stage 3 -------------------------------------------------------------------------------------------------------


def test_what_stage_3_cannot_do_is_refused():
    with refuses(ConfigError, "offload_param='cpu' with stage=2"):
        wrap(stage3.tree_of(0), mesh=mesh_of(W), stage=2, offload_param="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_kinds, "HOST_MEMORY", "far_host")
        with refuses(ConfigError, "the cpu backend has the memory kinds 'device'", "no 'far_host'"):
            wrap(stage3.tree_of(0), **STAGE3, mesh=mesh_of(W), offload_param="cpu")
    offloaded = wrap(stage3.tree_of(0), **STAGE3, mesh=mesh_of(W))
    grads = gradients_of(stage3.tree_of(1, stack=(W,)), mesh_of(W))
    grads.tree["embed"] = split(stage3.tree_of(1, stack=(W,))["embed"], mesh_of(W))
    with refuses(GradientError, "['embed']: gradient is float32[4, 33, 24], expected float32[33, 24]"):
        offloaded.update(grads)
