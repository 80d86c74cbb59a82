"""``wrap(model, params=...)``: parameters of groups have the model's names, and must be the model's."""

import warnings

import pytest
import torch

from frontends.torch import OffloadedAdamW, wrap
from offload_core import ConfigError, ParameterError
from tests.support.torch_models import make, same_bits, step

OPTIONS = {"lr": 1e-2, "param_dtype": "bfloat16", "state_format": "8bit"}


def groups_of(model, order):
    kinds = {"weights": [], "biases": []}
    for name, param in model.named_parameters():
        kinds["biases" if name.endswith("bias") else "weights"].append(param)
    return [{"params": kinds[kind]} for kind in order]


def trained(engine, first, steps):
    for seed in range(first, first + steps):
        step(engine, seed)
    engine.flush()
    return engine


def test_random_bits_do_not_depend_on_the_order_of_groups(tmp_path):
    orders = [("weights", "biases"), ("biases", "weights")]
    runs = []
    for order in orders:
        model = make()
        runs.append(trained(wrap(model, params=groups_of(model, order), **OPTIONS), 0, 3))
    runs[0].save_checkpoint(tmp_path)
    model = make()
    resumed = wrap(model, params=groups_of(model, orders[1]), **OPTIONS)
    resumed.load_checkpoint(tmp_path)
    for engine in (*runs, resumed):
        trained(engine, 3, 3)
        for p, q in zip(engine.parameters(), runs[0].parameters(), strict=True):
            assert same_bits(p, q)


def test_a_group_that_is_added_has_the_names_of_the_model():
    model = make()
    engine = wrap(model, params=[{"params": [model[0].weight, model[0].bias]}, {"params": model[2].weight}], lr=1e-2)
    engine.optimizer.add_param_group({"params": [model[2].bias]})
    trained(engine, 0, 1)
    assert [slot.name for slot in engine.optimizer.slots] == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.filterwarnings("ignore:parameters of the model that require a gradient:UserWarning")
@pytest.mark.parametrize("all_foreign", [True, False])
def test_parameters_of_another_model_are_refused(all_foreign):
    model, other = make(), make()
    params = [*other.parameters()] if all_foreign else [*model[0].parameters(), other[2].weight]
    with pytest.raises(ParameterError, match=r"is no parameter of the model, which would not be trained"):
        wrap(model, params=[{"params": params}], lr=1e-2)


def test_trainable_parameters_in_no_group_are_named_once():
    model = make()
    engine = wrap(model, params=model[0].parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match=r"are in no group: '2\.weight', '2\.bias'; they are not trained"):
        trained(engine, 0, 1)
    trained(engine, 1, 1)
    frozen = make()
    frozen[2].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = wrap(frozen, params=[("mine", frozen[0].weight), ("yours", frozen[0].bias)], lr=1e-2)
        trained(engine, 0, 1)


def test_what_is_no_tensor_is_named():
    with pytest.raises(ParameterError, match="params: got a str, expected parameters of the model"):
        wrap(make(), params=["0.weight"], lr=1e-2)
    with pytest.raises(ParameterError, match="got a tensor, expected an iterable"):
        wrap(make(), params=torch.ones(3), lr=1e-2)


@pytest.mark.parametrize(
    ("key", "name"),
    [("weightdecay", "weight_decay"), ("weight-decay", "weight_decay"), ("wd", "weight_decay"), ("LR", "lr"),
     ("learning_rate", "lr"), ("beta", "betas"), ("epsilon", "eps")],
)  # fmt: skip
def test_a_hyperparameter_of_a_group_under_a_wrong_name_is_refused(key, name):
    model = make()
    for made in (lambda groups: wrap(model, params=groups, lr=1e-2), lambda groups: OffloadedAdamW(groups, lr=1e-2)):
        with pytest.raises(ConfigError, match=rf"parameter group 1: '{key}' is no hyperparameter; expected '{name}'"):
            made([{"params": model[0].parameters()}, {"params": [*model[2].parameters()], key: 0.1}])


def test_other_keys_of_a_group_are_the_users_own():
    own = {"name": "body", "lr_scale": 0.5, "weight_decay_mult": 2, "max_lr": 1, "initial_lr": 1.0, "layer": 3, "l2": 0}
    [group] = OffloadedAdamW([{"params": make().parameters(), "weight_decay": 0.1, "wd": "a note", **own}]).param_groups
    assert {key: group[key] for key in own} == own
    assert group["wd"] == "a note"
