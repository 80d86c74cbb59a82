"""States in an accelerator's memory: a CUDA device's where there is one (bench/on_gpu.sh), else the simulated one's."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from frontends.torch import wrap
from frontends.torch.ranks.device import memory_of
from offload_core.dtypes import BFLOAT16, BY_NUMPY, FLOAT16, FLOAT32
from offload_core.native import kernels
from offload_core.native.grad_norm import SumOfSquares
from tests.support import state_formats as formats
from tests.support.kernel_calls import State
from tests.support.oracles import Adagrad, Adam, Lion, Muon, MuonDirection, Sgd
from tests.support.queue_kernels import in_place_of_kernels
from tests.support.torch_models import same_bits

pytestmark = pytest.mark.gpu
STEPS = {"adam": Adam, "sgd": Sgd, "lion": Lion, "adagrad": Adagrad, "direction": MuonDirection, "muon": Muon}
KINDS = list(product(kernels.RULES, formats.MASTERS, formats.MOMENTS))


def make(device):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)]
    return torch.nn.Sequential(*layers).to(device)


@pytest.fixture
def queue(accelerator):
    return memory_of(torch.device(accelerator, 0)).queue()


@pytest.mark.draws(25)
@pytest.mark.parametrize(("rule", "master", "moment"), KINDS, ids=lambda each: each)
def test_twenty_steps_on_the_device_have_the_bits_of_the_hosts(queue, accelerator, rule, master, moment):
    is_real, rng = accelerator == "cuda", np.random.default_rng(0)
    numel = 2**20 + 77 if is_real else 700
    dtypes = [(g, p) for g in (BFLOAT16, FLOAT32, FLOAT16) for p in (BFLOAT16, None, FLOAT32)]
    second, values = "bfloat16" if rule == "muon" else moment, rng.standard_normal((4, numel)).astype(np.float32)
    state = State(values[0], values[1], (values[2], np.abs(values[3])))
    here = formats.update_of(state, (master, moment, second), encode=formats.kernel_encode, seed=7)
    there = here
    for step in range(1, 21 if is_real else 4):
        grad_dtype, param_dtype = dtypes[step % len(dtypes)]
        given = STEPS[rule.partition("_")[0]](step=step, grad_scale=0.5 if step % 2 else 1.0)
        gradient = (rng.standard_normal(numel) * 10.0 ** rng.integers(-6, 3)).astype(grad_dtype.numpy)
        kind = {"rule": rule, "param_dtype": param_dtype}
        here, there = (replace(each, grad=gradient) for each in (here, there))
        [here] = formats.run([here.of(given)], given.scalars(rule), **kind)
        with in_place_of_kernels(queue):
            [there] = formats.run([there.of(given)], given.scalars(rule), **kind)
        formats.assert_same_update(f"{rule}, {master}, {moment}, step {step}", there, here)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_the_sum_of_squares_on_the_device_is_the_hosts(queue, dtype):
    values = np.random.default_rng(0).standard_normal(100_003).astype(np.float32)
    values *= np.exp2(np.random.default_rng(1).integers(-40, 10, values.size)).astype(np.float32)
    host = values.astype(dtype.numpy)
    memory = queue.allocate(host.nbytes)
    queue.to_device(host, memory).wait()
    at = int(queue.arrays([memory]).addresses[0])
    spans = kernels.spans_of([(at, 0, 1000), (at + 1000 * dtype.itemsize, 0, host.size - 1000)])
    found, expected = SumOfSquares(), SumOfSquares()
    found.bins += queue.squares([(spans, dtype)])()
    expected.add(kernels.spans_of([(kernels.address(host), 0, host.size)]), BY_NUMPY[host.dtype], threads=1)
    assert found.exact() == expected.exact()


@pytest.mark.draws(2)
@pytest.mark.parametrize("fields", [{}, {"gradient_clipping": 0.05}, {"gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("share", [{"offload_optimizer": None}, {"device_states_bytes": 2**20}], ids=str)
def test_a_model_whose_states_are_on_the_device_has_the_bits_of_one_whose_states_are_on_the_host(
    accelerator, share, fields
):
    engines = [
        wrap(make(accelerator), lr=1e-2, param_dtype="bfloat16", reduce_bucket_size=40_000, **fields, **more)
        for more in ({}, share)
    ]
    assert engines[1].memory_report().device_bytes > engines[0].memory_report().device_bytes
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(16, 256).to(torch.bfloat16).to(accelerator)
        for engine in engines:
            engine.backward(engine(x).square().mean())
            engine.step()
    for ours, theirs in zip(*(engine.module.parameters() for engine in engines), strict=True):
        assert same_bits(ours, theirs)
    with engines[1].released():
        pass
    for state, other in zip(*(engine.optimizer.state_dict()["state"].values() for engine in engines), strict=True):
        assert all(same_bits(state[name], other[name]) for name in state)
