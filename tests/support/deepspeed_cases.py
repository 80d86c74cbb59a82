"""Configurations of ``tests/workers/deepspeed_script.py``."""

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.05, "torch_adam": True}}
CONFIG = {"optimizer": ADAMW}
TYPES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12}},
}


def case(stage, dtype="fp32", *, config=None, **script):
    """A case: ``script`` says how the script differs, ``config`` the configuration."""
    given = {**CONFIG, **TYPES[dtype], "zero_optimization": {"stage": stage}, **(config or {})}
    if "client" in script:
        del given["optimizer"]
    return {"config": given, "dtype": dtype, **script}


def scheduler(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


THREE = {"gradient_accumulation_steps": 3}
IN_FP32 = {**THREE, "data_types": {"grad_accum_dtype": "fp32"}}
WARMUP = scheduler("WarmupLR", warmup_max_lr=1e-2, warmup_num_steps=5)
COSINE = scheduler("WarmupCosineLR", total_num_steps=12, warmup_num_steps=3)
CASES = {
    **{f"stage {stage}, {dtype}": case(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")},
    **{f"accumulation, stage {s}": case(s, config=THREE, steps=9) for s in range(4)},
    **{f"accumulation, stage {s}, bf16": case(s, "bf16", config=IN_FP32, steps=9) for s in (2, 3)},
    "no clipping": case(2, config={"gradient_clipping": 0}),
    "tight clipping": case(2, config={"gradient_clipping": 0.01}),
    "tight clipping, stage 3, bf16": case(3, "bf16", config={"gradient_clipping": 0.01}),
    "warm-up": case(1, config=WARMUP),
    "warm-up along a line": case(2, config=scheduler("WarmupLR", warmup_num_steps=5, warmup_type="linear")),
    "warm-up and decay": case(2, config=scheduler("WarmupDecayLR", total_num_steps=7, warmup_num_steps=3)),
    "a cosine": case(3, config=COSINE),
    "a range test": case(0, config=scheduler("LRRangeTest", lr_range_test_min_lr=1e-3, lr_range_test_step_size=3)),
    "one cycle": case(2, config=scheduler("OneCycle", cycle_min_lr=1e-3, cycle_max_lr=1e-2, cycle_first_step_size=3)),
    "groups": case(2, groups=True),
    "groups under a cosine": case(1, groups=True, config=COSINE),
    "groups under a warm-up": case(2, groups=True, config=scheduler("WarmupLR", warmup_num_steps=4)),
    **{f"overflow, stage {s}": case(s, "fp16", overflow=(2, 3), norms=False) for s in (1, 2, 3)},
    "overflow of bf16": case(2, "bf16", overflow=(2,), norms=False),
    "a client's AdamW": case(1, client=("AdamW", {"lr": 1e-2})),
    "a client's Adam with decay": case(2, client=("Adam", {"lr": 1e-2, "weight_decay": 0.1})),
    "a client's SGD": case(2, client=("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True})),
    "a client's Adagrad": case(1, client=("Adagrad", {"lr": 0.1})),
    "a client's function": case(2, client=("AdamW", {"lr": 1e-2}), as_function=True),
    "a client's groups": case(2, "bf16", client=("AdamW", {"lr": 1e-2}), groups=True),
    "a client's states": case(0, client=("AdamW", {"lr": 1e-2}), before=3),
    "a client's scheduler": case(
        2, client=("AdamW", {"lr": 1e-2}), schedule=("StepLR", {"step_size": 2, "gamma": 0.5})
    ),
    "a client's scheduler by a function": case(
        1, client=("AdamW", {"lr": 1e-2}), schedule=("ExponentialLR", {"gamma": 0.7}), as_function=True
    ),
    "no_sync, stage 0": case(0, no_sync=True),
    "no_sync, stage 1": case(1, no_sync=True),
    "a plain backward": case(2, config={"gradient_accumulation_steps": 2}, backward="plain"),
    "a plain backward, stage 3": case(3, config={"gradient_accumulation_steps": 2}, backward="plain"),
    "a loss that is divided already": case(1, config={"gradient_accumulation_steps": 2}, backward="summed"),
    "the boundary by hand": case(2, config={"gradient_accumulation_steps": 2}, boundary_by_hand=True),
    "a larger batch": case(1, config={"gradient_accumulation_steps": 2}, larger_batch_at=4, steps=12),
    **{f"resumed, stage {s}": case(s, resume=4, config=WARMUP) for s in (1, 2, 3)},
    "resumed in bf16": case(2, "bf16", resume=4, config=COSINE),
    "resumed in fp16": case(1, "fp16", resume=5, overflow=(2,), norms=False),
}
"""By name."""
FOR_TWO = [
    *(f"stage {stage}, {dtype}" for stage in range(4) for dtype in ("fp32", "bf16")),
    *(f"accumulation, stage {stage}" for stage in range(4)),
    "groups under a cosine",
    "a client's SGD",
    "no_sync, stage 1",
    "a plain backward, stage 3",
    "a larger batch",
    "resumed, stage 2",
    "resumed, stage 3",
]
"""Those that two ranks run, too."""
