"""Settings in the words of JAX and optax."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from frontends.jax import OffloadConfig, wrap
from offload_core.errors import ConfigError

PARAMS = {"w": np.ones(3, np.float32)}
SCHEDULE = optax.constant_schedule(0.1)


ADDRESS = re.compile(r" at 0x\w+")
"""A function's, which differs between processes."""


@pytest.mark.draws(3)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"learning_rate": 0.1}, {"lr": 0.1}),
        ({"learning_rate": SCHEDULE}, {"lr": SCHEDULE}),
        ({"b1": 0.8, "b2": 0.7}, {"betas": (0.8, 0.7)}),
        ({"b1": 0.8}, {"betas": (0.8, 0.999)}),
        ({"b2": 0.7}, {"betas": (0.9, 0.7)}),
        ({"config": {"betas": [0.5, 0.6], "learning_rate": 1}, "b2": 0.7}, {"betas": (0.5, 0.7), "lr": 1}),
        ({"config": OffloadConfig(betas=(0.5, 0.6), lr=2.0), "b1": 0.7}, {"betas": (0.7, 0.6), "lr": 2.0}),
        ({"config": {"lr": 1, "b1": 0.5}, "learning_rate": 0.2, "b2": 0.6}, {"betas": (0.5, 0.6), "lr": 0.2}),
        (
            {"config": {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.3}}}, "b1": 0.7},
            {
                "lr": 0.3,
                "betas": (0.7, 0.999),
                "weight_decay": 0.0,
                "gradient_clipping": 1.0,
                "skip_nonfinite": True,
                "average_plain_backward": True,
            },  # DeepSpeed's own defaults
        ),
        ({"param_dtype": jnp.bfloat16}, {"param_dtype": "bfloat16"}),
        ({"param_dtype": np.dtype(ml_dtypes.bfloat16)}, {"param_dtype": "bfloat16"}),
        ({"param_dtype": np.float16}, {"param_dtype": "float16"}),
        ({"param_dtype": jnp.ones(1).dtype}, {"param_dtype": "float32"}),
        ({"config": {"communication_dtype": jnp.float32}}, {"communication_dtype": "float32"}),
    ],
    ids=lambda value: ADDRESS.sub("", str(value)),
)
def test_a_setting_in_jax_words_is_the_same_setting(theirs, ours):
    assert wrap(PARAMS, **theirs).config == wrap(PARAMS, **ours).config


@pytest.mark.draws(5)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"average_over_ranks": False},
            "averaged already; expected True, and a loss that is multiplied by the number of devices",
        ),
        ({"learning_rate": 0.1, "lr": 0.2}, "learning_rate=0.1 beside lr=0.2: they are one setting; expected one"),
        ({"b1": 0.1, "betas": (0.2, 0.3)}, "b1=0.1 beside betas=(0.2, 0.3): they are one setting"),
        ({"config": {"learning_rate": 0.1, "lr": 0.2}}, "learning_rate=0.1 beside lr=0.2"),
        ({"config": {"betas": lambda _: (0.1, 0.2)}, "b1": 0.5}, "b1 or b2 beside betas that are a function"),
        ({"learning_rte": 0.1}, "unknown configuration field 'learning_rte'; did you mean 'learning_rate'?"),
        ({"config": {"learning_rte": 0.1}}, "did you mean 'learning_rate'?"),
        ({"weigth_decay": 0.1}, "did you mean 'weight_decay'?"),
        ({"learning_rate": -1}, "lr: got -1, expected a finite number >= 0"),
        ({"b2": 1.0}, "betas[1]: got 1.0"),
        ({"param_dtype": jnp.float64}, "param_dtype: got <class 'jax.numpy.float64'>, expected one of None, 'float32'"),
        ({"param_dtype": int}, "param_dtype: got <class 'int'>"),
        ({"communication_dtype": 3}, "communication_dtype: got 3"),
        ({"freeze": {"w": True}}, "'freeze'; expected trainable=, booleans in the parameters' structure"),
        ({"config": {"frozen": None}}, "'frozen'; expected trainable="),
        ({"decay_mask": None}, "'decay_mask'; expected mask="),
        ({"nesterov": True}, "nesterov=True has no place in optimizer='adamw'; expected optimizer='sgd' beside it"),
        ({"mu_dtype": jnp.bfloat16}, "'mu_dtype'; expected 'exp_avg_dtype'"),
        ({"nu_dtype": jnp.bfloat16}, "'nu_dtype'; expected 'exp_avg_sq_dtype'"),
        ({"every_k_schedule": 2}, "'every_k_schedule'; expected 'gradient_accumulation_steps'"),
        ({"axis_name": "dp"}, "'axis_name'; expected axis=, beside mesh="),
        ({"tx": optax.adamw(0.1)}, "'tx'; wrap() makes the optimizer: give its name and settings, such as"),
        ({"config": optax.adamw(0.1)}, "wrap() makes the optimizer: give its name and settings, such as"),
    ],
    ids=lambda value: ADDRESS.sub("", str(value)),
)
def test_a_wrong_setting_is_refused_by_name(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        wrap(PARAMS, **fields)
