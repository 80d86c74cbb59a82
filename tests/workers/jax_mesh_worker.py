"""Checks laws of the JAX front end on a mesh: RESULTS DEVICES LAWS [ADDRESS PROCESS], run by test_jax_mesh.py.

LAWS are names with commas between them. RESULTS gets a line of JSON for each law, as soon as it has been checked: its
name, and the traceback of its failure or null.
"""

import faulthandler
import json
import sys
import traceback

import jax

from tests.support.jax_laws import ONE_PROCESS, TWO_PROCESSES


def main(results, n_devices, laws, address=None, process="0"):
    faulthandler.enable()
    jax.config.update("jax_num_cpu_devices", int(n_devices))
    jax.config.update("jax_platforms", "cpu")
    if address is not None:
        jax.distributed.initialize(address, 2, int(process))
    by_name = {law.__name__: law for law in (ONE_PROCESS if address is None else TWO_PROCESSES)}
    with open(results, "w", buffering=1) as file:
        for name in laws.split(","):
            failure = None
            try:
                by_name[name]()
            except Exception:
                failure = traceback.format_exc()
            print(json.dumps([name, failure]), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
