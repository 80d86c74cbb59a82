"""Settings of update rules: their defaults, and the values that stay when another rule is asked for."""

import copy
import pickle
from dataclasses import replace

import pytest

from offload_core import ConfigError, OffloadConfig

CHANGES = {
    "resolve": lambda config, **fields: OffloadConfig.resolve(config, **fields),
    "replace": replace,
    "a copy": lambda config, **fields: replace(copy.deepcopy(pickle.loads(pickle.dumps(config))), **fields),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_value_that_was_set_stays_and_a_default_follows_the_rule(change):
    made = CHANGES[change](OffloadConfig(weight_decay=0.01), optimizer="sgd")
    assert (made.weight_decay, made.betas, made.eps) == (0.01, None, None)
    assert CHANGES[change](OffloadConfig(), optimizer="sgd").weight_decay == 0
    back = CHANGES[change](OffloadConfig(optimizer="sgd"), optimizer="adamw")
    assert back == OffloadConfig()
    assert back.values(0) == OffloadConfig().values(0)
    with pytest.raises(ConfigError, match=r"betas=\(0.9, 0.999\) has no place in optimizer='sgd'"):
        CHANGES[change](OffloadConfig(betas=(0.9, 0.999)), optimizer="sgd")


def test_values_that_a_step_reads_are_plain_numbers():
    values = OffloadConfig().values(0)
    assert {type(value) for value in values.values()} == {float, tuple}
