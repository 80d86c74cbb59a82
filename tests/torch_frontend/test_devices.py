"""Results of training do not depend on the device, nor on when its kernels and copies run."""

import pytest
import torch

from frontends.torch import OffloadedAdamW, wrap
from tests.support.torch_models import assert_all_same, batch, everything, make

STREAMED = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}
SETTINGS = [
    {},
    {"schedule": "serial"},
    {"schedule": "delayed", "delay_warmup_steps": 2},
    {"stage": 1, "reduce_bucket_size": 500},
    {"gradient_clipping": 0.05, "reduce_bucket_size": 500},
    {"param_dtype": "bfloat16", "gradient_clipping": 0.05},
    {"param_dtype": "float16", "loss_scale": "dynamic", "initial_loss_scale": 256.0},
    {"gradient_accumulation_steps": 3, "param_dtype": "bfloat16"},
    {"pin_memory": False},
    {"stage": 3, "param_persistence_threshold": 0},
    STREAMED,
    {**STREAMED, "param_dtype": "bfloat16", "gradient_accumulation_steps": 2, "max_live_parameters": 2100},
]


pytestmark = pytest.mark.parametrize("device", ["host", *(f"simulated, delays {n}" for n in range(2))], indirect=True)


def run(engine, seeds, device):
    dtype = next(engine.module.parameters()).dtype
    reports = []
    for seed in seeds:
        engine.backward(engine(batch(seed, dtype, device)).float().pow(2).mean())
        reports.append(engine.step())
    return reports


@pytest.mark.draws(5)
@pytest.mark.quick
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_every_setting_gives_the_hosts_bits(fields, device):
    host, engine = wrap(make(device="cpu"), lr=1e-2, **fields), wrap(make(), lr=1e-2, **fields)
    assert run(engine, range(6), device) == run(host, range(6), "cpu")
    assert_all_same(everything(engine), everything(host))
    engine.close()


@pytest.mark.draws(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_normalisation_convolution_and_dropout_of_nothing_too(dtype, device):
    found = []
    for place in (device, "cpu"):
        torch.manual_seed(0)
        layers = [
            torch.nn.Unflatten(1, (2, 4, 4)),
            torch.nn.Conv2d(2, 4, 3),
            torch.nn.GroupNorm(2, 4),
            torch.nn.Flatten(),
        ]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.0))
        engine = wrap(model.to(place), lr=1e-2, param_dtype=dtype)
        run(engine, range(4), place)
        found.append(everything(engine))
    assert_all_same(*found)


@pytest.mark.draws(1)
def test_an_overflow_is_skipped_on_every_device(device):
    found = []
    for place in (device, "cpu"):
        engine = wrap(
            make(device=place), lr=1e-2, param_dtype="float16", loss_scale="dynamic", initial_loss_scale=2.0**24
        )
        reports = run(engine, range(16), place)
        assert not reports[0].updated
        assert reports[-1].updated
        found.append(everything(engine))
    assert_all_same(*found)


@pytest.mark.draws(1)
def test_the_optimizer_alone_reads_gradients_where_they_are(device):
    found = []
    for place in (device, "cpu"):
        model = make(device=place)
        optimizer = OffloadedAdamW(model.parameters(), lr=1e-2)
        for seed in range(5):
            optimizer.zero_grad()
            model(batch(seed, device=place)).pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        found.append([p.detach().cpu() for p in model.parameters()])
    assert_all_same(*found)


@pytest.mark.draws(2)
@pytest.mark.parametrize("fields", [{"param_dtype": "bfloat16"}, {"schedule": "delayed"}, STREAMED], ids=str)
def test_a_run_that_was_saved_on_one_device_goes_on_as_it_was_on_another(fields, device, tmp_path):
    straight = wrap(make(), lr=1e-2, **fields)
    run(straight, range(4), device)
    straight.save_checkpoint(tmp_path, wait=False)
    run(straight, range(4, 8), device)
    straight.wait_for_checkpoint()
    expected = everything(straight)
    for place in (device, "cpu"):
        resumed = wrap(make(seed=1, device=place), lr=1e-2, **fields)
        resumed.load_checkpoint(tmp_path, random_state=place == device)
        run(resumed, range(4, 8), place)
        assert_all_same(everything(resumed), expected)


def test_a_parameter_that_is_written_by_hand_is_followed(device):
    found = []
    for place in (device, "cpu"):
        engine = wrap(make(device=place), lr=1e-2, param_dtype="bfloat16")
        run(engine, range(2), place)
        with torch.no_grad():
            engine.module[0].weight.mul_(0.5)
        run(engine, range(2, 4), place)
        found.append(everything(engine))
    assert_all_same(*found)


@pytest.mark.draws(2)
def test_a_default_device_does_not_attract_what_is_the_hosts(device, tmp_path):
    inputs, found = [batch(seed) for seed in range(4)], []
    for default in (device, "cpu"):
        engine, resumed = wrap(make(), lr=1e-2), wrap(make(seed=1), lr=1e-2)
        with torch.device(default):
            for n, x in enumerate(inputs):
                if n == 2:
                    engine.save_checkpoint(tmp_path / default)
                    resumed.load_checkpoint(tmp_path / default)
                for each in (engine, resumed)[: 1 + n // 2]:
                    each.backward(each(x).pow(2).mean())
                    each.step()
        found += [everything(engine), everything(resumed)]
    for each in found[1:]:
        assert_all_same(each, found[0])
