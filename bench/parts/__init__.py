"""The benchmarks: each part is ``python -m bench.parts.NAME``, and all are ``python -m bench.run``."""

PARTS = {
    "peers": 240,  # compiles DeepSpeed's Adam
    "update": 800,
    "step": 900,
    "ranks": 600,
    "jax_step": 250,
    "memory": 200,
    "exactness": 60,
    "overlap": 200,
}
"""Seconds after which each part is given up; together they took 20 minutes on 2 cores in a slow hour."""
ON_REQUEST = {
    "jax_mesh": 400,
    "fsdp2": 1200,  # most of it writes and reads 36 GB
    "checkpoint": 500,
    "profile": 300,
    "default_allocator": 500,
    "state_formats": 250,
    "small_params": 120,
    "many_cores": 250,
    "eight_bit": 500,
    "trainer": 400,
    "phases": 600,
    "muon_step": 300,
    "layerwise": 7200,  # nearly all of it with 3 B parameters on disk
    "nvme": 600,  # with the default sizes; a run of 1 B parameters takes 20 minutes
}
"""Parts that run only if they are named."""
