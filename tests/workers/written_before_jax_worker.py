"""Saves what tests/support/written_before.py says, or goes on from it, on two devices at stage 3: SCENARIO FOLDER."""

import json
import sys
from pathlib import Path

import jax

from tests.support import written_before


def main(scenario, folder):
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_platforms", "cpu")
    found = {}
    for name in written_before.JAX if scenario == "saved" else ["stage 3"]:
        mesh = jax.make_mesh((2,), ("dp",)) if name == "stage 3" else None
        run = written_before.JaxRun(name, "start" if scenario == "saved" else "other", mesh)
        follow = getattr(written_before, scenario)
        found[name] = follow(run, folder / "jax" / name, folder)
    (folder / "jax.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
