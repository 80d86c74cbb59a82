"""Laws of the JAX front end on a mesh, by theme; `test_jax_mesh.py` has `jax_mesh_worker.py` check each of them.

A law is a function without arguments that is in one list of ``common.py`` or in both.
"""

from tests.support.jax_laws import bits, differentiation, formats, placements, programs, refusals, states
from tests.support.jax_laws.common import ONE_PROCESS, TWO_PROCESSES

__all__ = [
    "ONE_PROCESS",
    "TWO_PROCESSES",
    "bits",
    "differentiation",
    "formats",
    "placements",
    "programs",
    "refusals",
    "states",
]
