"""States in formats of fewer bytes, on a mesh."""

import jax
import pytest

from frontends.jax import wrap
from tests.support.jax_meshes import HYPER, assert_same_tree, mesh_of, processes, replicated
from tests.support.jax_stage2 import tree_of

FORMATS = [{"state_format": "bf16"}, {"state_format": "8bit", "master_dtype": "bfloat16"}]


@pytest.mark.long("two processes, each of which compiles its programs with XLA")
@pytest.mark.draws(1)
@processes(1, 2)
def test_narrow_states_have_the_bits_of_one_device():
    """At stages 1 and 2, where parameters are whole on every rank: none of their elements has another number."""
    mesh = mesh_of(4)
    for fields in FORMATS:
        given = {**HYPER, **fields, "param_dtype": "bfloat16"}
        ours = wrap(tree_of(1), **given, mesh=mesh, reduce_bucket_size=300)
        with jax.default_device(jax.local_devices()[0]):
            theirs = wrap(tree_of(1), **given)
        for seed in range(3):
            grads = tree_of(seed)
            assert_same_tree(ours.update(replicated(grads, mesh)), theirs.update(grads))
        assert_same_tree(ours.to_pytree(), theirs.to_pytree())
