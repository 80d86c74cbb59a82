"""The parts ``update`` and ``muon_step``: a call's traffic is what it reads and writes, and every rule is measured."""

import numpy as np
import pytest
import torch

from bench.harness.rule_updates import FORMATS, calls, distinct_formats, formats_of, gradient
from bench.harness.streaming import BLOCK, READ, UPDATE, WRITE, bytes_a_parameter, streaming
from bench.parts import many_cores, torch_contenders
from bench.parts.update_rules import FUSED, METRIC, RULES, measure_rule
from offload_core.config.options import OffloadConfig
from offload_core.dtypes import BFLOAT16, FLOAT32
from offload_core.memory.host_memory import HostMemory

N = 4 * BLOCK


def calls_of(name, formats, dtype=BFLOAT16):
    config, memory = OffloadConfig(op_order="torch", **RULES[name].fields), HostMemory(1)
    rule = config.rule()
    param = None if dtype is FLOAT32 else memory.allocate("param", N, BFLOAT16.numpy)
    hyper, grad = rule.hyper(**config.values(0)), gradient(memory, N, dtype)
    return calls(memory, 1, rule, hyper, formats_of(rule, formats), grad, param)


@pytest.mark.draws(9)
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", RULES)
def test_a_call_writes_the_arrays_that_its_traffic_says(name, formats):
    for call in calls_of(name, formats).values():
        before = [array.tobytes() for array, _ in call.traffic]
        call.run()
        for (array, mode), old in zip(call.traffic, before, strict=True):
            is_high = mode == UPDATE and formats.startswith("split") and array.dtype == BFLOAT16.numpy
            may_stay = array.dtype == np.uint8 or is_high  # ties, scales and upper halves: a small step may leave them
            assert may_stay or (array.tobytes() != old) == (mode != READ)


@pytest.mark.parametrize("name", [name for name, peers in RULES.items() if peers.fused])
def test_bytes_are_those_of_the_gradient_the_states_and_the_parameter(name):
    peer = RULES[name].fused
    param = torch.nn.Parameter(torch.ones(N))
    param.grad = torch.ones(N)
    optimizer = peer([param], fused=True)
    optimizer.step()
    states = sum(state.nbytes for state in optimizer.state[param].values() if state.numel() == N)
    traffic = calls_of(name, "fp32", FLOAT32)["update"].traffic
    assert bytes_a_parameter(traffic, N) == (param.grad.nbytes + 2 * param.nbytes + 2 * states) / N


@pytest.mark.parametrize("formats", many_cores.BYTES)
def test_narrow_formats_take_the_bytes_that_many_cores_predicts_with(formats):
    traffic = calls_of("AdamW", formats)["update"].traffic
    assert bytes_a_parameter(traffic, N) == many_cores.BYTES[formats]


def test_formats_that_a_rule_stores_alike_are_measured_once():
    rule = OffloadConfig(op_order="torch", optimizer="muon").rule()
    assert distinct_formats(rule) == ["fp32", "split masters", "bf16 masters"]


def test_streaming_leaves_values_and_passes_over_written_arrays_to_their_end():
    read, updated, written = (np.arange(1, N + 1, dtype=np.uint32) for _ in range(3))
    streaming([(read, READ), (updated, UPDATE), (written, WRITE)], N, threads=2)()
    assert (read == updated).all()
    assert read[0] == 1
    assert not written.any()


@pytest.mark.slow
def test_each_pass_of_a_rule_stands_beside_its_limit_and_torch():
    measured = measure_rule("AdamW", N, threads=1, rounds=2)
    names = {row["name"] for row in measured["rows"] if row["metric"] == METRIC}
    assert {f"AdamW: {what}" for what in ("fp32", "fp32, limit", "bf16, 8-bit moments", FUSED)} <= names
    targets = {ratio["name"]: ratio["target"] for ratio in measured["ratios"]}
    assert targets["AdamW: fp32 / its limit"] == 1.1
    assert targets[f"AdamW: fp32 / {FUSED}"] == 1.0


def test_both_contenders_of_muon_compute_the_same():
    settings = {"threads": 1, "micro_batch": 2, "device": "cpu", "param_dtype": "float32"}
    gpt = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 256, "positions": 16}
    losses = []
    for name in (torch_contenders.MUON, torch_contenders.TORCH_MUON):
        contender = torch_contenders.CONTENDERS[name]
        step = contender.make(torch_contenders.make_model(contender, settings | {"gpt": gpt}), settings)
        batch = torch.arange(34).reshape(2, 17)
        losses.append([step(batch[:, :-1], batch[:, 1:])["loss"] for _ in range(4)])
    ours, theirs = losses
    assert ours[0] == theirs[0]
    assert ours[-1] < ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)  # they round the norm differently
