"""``engine.accumulate()``: the bits of the loop over micro-batches, with each block's parameters there twice a step."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from frontends.torch import wrap
from offload_core.errors import ParameterError
from offload_core.step.update import Updates
from tests.support import simulated
from tests.support.blocks import Gathered, Gpt, batches, by_blocks, loop, loss_of, made
from tests.support.device_memory import allocated_before
from tests.support.late_stores import PARAMETERS_ON_DISK
from tests.support.torch_models import assert_all_same, everything, on, place, same_bits

BF16 = {"param_dtype": "bfloat16"}
STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}
SETTINGS = {
    "fp32": {},
    "bf16, clipped": {**BF16, "gradient_clipping": 0.1},
    "fp16": {"param_dtype": "float16", "initial_loss_scale": 2.0**26, "loss_scale_window": 3},
    "delayed": {**BF16, "schedule": "delayed", "delay_warmup_steps": 2},
    "serial": {**BF16, "schedule": "serial"},
    "in backward": {"update_in_backward": True, "reduce_bucket_size": 1000},
    "sent early": {**BF16, "update_in_backward": True, "gradient_clipping": 1e3},
    "stage 3": {**BF16, **STAGE_3, "gradient_clipping": 0.1},
    "stage 3, in backward": {**STAGE_3, "update_in_backward": True, "reduce_bucket_size": 1000},
    "stage 3, shards on the device": {**BF16, "stage": 3, "param_persistence_threshold": 0},
    "stage 3, on disk": {**BF16, **PARAMETERS_ON_DISK, "param_persistence_threshold": 0},
    "muon": {**BF16, "optimizer": "muon"},
}
ON_HOST = {"host_activation_memory": 1 << 20}


def pair(n, layerwise=True, model=None, **fields):
    """An engine for the loop, and one for ``accumulate()``."""
    return [
        wrap(made(**(model or {})), lr=1e-2, gradient_accumulation_steps=n, layerwise=each, **fields)
        for each in (False, layerwise)
    ]


@pytest.mark.draws(3)
@pytest.mark.long("several trainings, on a device that is late")
@pytest.mark.parametrize("name", SETTINGS)
def test_the_bits_are_those_of_the_loop(name, device, drawn):
    """With micro-batches of different lengths."""
    fields, steps = SETTINGS[name], 5 if device == "cpu" else 2
    for n in drawn([1, 3, 8], 1):
        where = drawn([{}, ON_HOST], 1)[0]
        one, other = pair(n, layerwise=n > 1, **fields, **where)
        for step in range(steps):
            (losses, report), (others, of_other) = loop(one, batches(n, step)), by_blocks(other, batches(n, step))
            assert losses == others
            assert (report.updated, report.grad_norm, report.loss_scale) == (
                of_other.updated,
                of_other.grad_norm,
                of_other.loss_scale,
            )
        assert_all_same(everything(other), everything(one))
        one.close()
        other.close()


@pytest.mark.draws(1)
@pytest.mark.parametrize("name", ["bf16", "stage 3"])
def test_the_bits_are_those_of_torch_with_fp32_masters(name):
    """Gradients in bf16, summed in fp32, and fused AdamW over fp32 masters: plain torch."""
    fields = BF16 if name == "bf16" else {**BF16, **STAGE_3}
    engine = wrap(made(), lr=1e-2, gradient_accumulation_steps=3, layerwise=True, **fields)
    model = made().bfloat16()
    masters = [nn.Parameter(param.detach().float()) for param in made().parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    for step in range(6):
        by_blocks(engine, batches(3, step))
        sums = [torch.zeros_like(master) for master in masters]
        for batch in batches(3, step):
            model.zero_grad()
            loss_of(model(batch), batch).backward()
            for total, param in zip(sums, model.parameters(), strict=True):
                total += param.grad
        for master, total in zip(masters, sums, strict=True):
            master.grad = total * torch.tensor(1 / 3)  # docs/numerics.md
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
    weights = dict(engine.named_weights(dtype="float32"))
    for (param, _), master in zip(made().named_parameters(), masters, strict=True):
        assert same_bits(weights[param], master), param


def test_tied_weights_alone_have_sums_in_another_order(device):
    one, other = pair(3, model={"tied": True})
    data = batches(3)
    for batch in data[:-1]:
        one.backward(loss_of(one(batch), batch))
        one.step()
    one.backward(loss_of(one(data[-1]), data[-1]))
    other.accumulate(data, loss_of)
    for (name, param), theirs in zip(other.module.named_parameters(), one.module.parameters(), strict=True):
        mine, expected = (e.optimizer.whole_gradient(p) for e, p in ((other, param), (one, theirs)))
        assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-7), name
        assert same_bits(mine, expected) or name == "embedding.weight", name


def test_frozen_blocks_before_what_is_trained():
    for fields in ({}, STAGE_3):
        one, other = pair(3, model={"frozen": 2}, **fields)
        for step in range(4):
            assert loop(one, batches(3, step))[0] == by_blocks(other, batches(3, step))[0]
        assert_all_same(everything(other), everything(one))


@pytest.mark.draws(1)
@pytest.mark.parametrize("n", [1, 2, 8, 32])
def test_each_parameter_of_a_block_is_gathered_twice_a_step_for_any_number_of_micro_batches(n, monkeypatch):
    engine = wrap(made(), gradient_accumulation_steps=n, layerwise=True, **STAGE_3)
    by_blocks(engine, batches(n))
    gathered = Gathered(monkeypatch, engine)
    by_blocks(engine, batches(n, 1))
    of_blocks = {name: count for name, count in gathered.counts.items() if name.startswith("layers.")}
    assert {count for name, count in of_blocks.items() if not name.startswith("layers.2.")} == {2}
    assert {count for name, count in of_blocks.items() if name.startswith("layers.2.")} == {1}, "it runs again at once"
    assert gathered.counts["head.weight"] == 1
    assert gathered.counts["embedding.weight"] <= 2


@pytest.mark.parametrize("examined", [False, True])
def test_updates_begin_while_earlier_blocks_run_backward(examined, monkeypatch):
    """Where no step examines all gradients first: the buckets of the last block are updated before block 0 runs
    again."""
    clipped = {"gradient_clipping": 1.0} if examined else {}
    fields = {"update_in_backward": True, "reduce_bucket_size": 500, "gradient_accumulation_steps": 3, **clipped}
    engine = wrap(made(), layerwise=True, **fields)
    by_blocks(engine, batches(3))
    events, compute = [], Updates._run

    def computes(updates, bucket, *args, **options):
        events.append("update")
        return compute(updates, bucket, *args, **options)

    monkeypatch.setattr(Updates, "_run", computes)
    engine.module.layers[0].norm.register_forward_hook(lambda *_: events.append("block 0"))
    engine.accumulate(batches(3, 1), loss_of)
    engine.step()
    again = events.index("block 0", 3)
    assert events[:3] == 3 * ["block 0"], "in forward"
    assert ("update" in events[3:again]) is not examined
    assert "update" in events[again:]


@pytest.mark.draws(1)
def test_dropout_draws_again_what_it_drew_and_a_run_is_reproducible(device):
    def trained():
        engine = wrap(made(drop=0.3), lr=1e-2, gradient_accumulation_steps=3, layerwise=True)
        torch.manual_seed(5)
        losses = [by_blocks(engine, batches(3, step))[0] for step in range(3)]
        return losses, everything(engine), torch.get_rng_state()

    one, other = trained(), trained()
    assert one[0] == other[0]
    assert_all_same(other[1], one[1])
    assert torch.equal(one[2], other[2])
    model = made(drop=0.3)
    engine = wrap(made(drop=0.3), gradient_accumulation_steps=1)
    batch = batches(1)[0]
    torch.manual_seed(7)
    loss_of(model(batch), batch).backward()
    torch.manual_seed(7)
    engine.accumulate([batch], loss_of)
    for param, ours in zip(model.parameters(), engine.module.parameters(), strict=True):
        assert same_bits(engine.optimizer.whole_gradient(ours), param.grad), "of one micro-batch, the loop's draws"


def test_statistics_of_batches_change_once():
    """BatchNorm in a block: each micro-batch counts once, as in the loop, though the block runs twice."""

    def model():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3)))

    one, other = (wrap(model(), gradient_accumulation_steps=2) for _ in range(2))
    for step in range(3):
        data = [torch.randn(6, 8, generator=torch.Generator().manual_seed(2 * step + i)) for i in range(2)]
        for x in data:
            one.backward(one(x).pow(2).mean())
            one.step()
        other.accumulate(data, lambda output, _: output.pow(2).mean())
        other.step()
    assert_all_same(everything(other), everything(one))
    assert int(other.module[0][1].num_batches_tracked) == 6


@pytest.mark.draws(1)
def test_several_calls_are_one_update_and_average_over_all_micro_batches(device):
    one, other = pair(4)
    loop(one, batches(4))
    data = batches(4)
    other.accumulate(data[:3], loss_of)
    assert other.step().skipped == "accumulating"
    other.accumulate(data[3:], loss_of)
    assert other.step().updated
    assert_all_same(everything(other), everything(one))
    loop(one, batches(4, 1))
    data = batches(4, 1)
    other.accumulate(data[:2], loss_of)
    other.accumulate(data[2:3], loss_of)
    assert other.step().skipped == "accumulating"
    other.backward(loss_of(other(data[3]), data[3]))
    assert other.step().updated
    assert_all_same(everything(other), everything(one))


def test_sums_and_an_early_end():
    """``average=False`` sums, and ``step(boundary=True)`` updates after fewer micro-batches."""
    one, other = pair(4)
    data = batches(3)
    for batch in data:
        one.backward(loss_of(one(batch), batch) / 3, average=False)
    one.step(boundary=True)
    other.accumulate(data, lambda output, batch: loss_of(output, batch) / 3, average=False)
    other.step(boundary=True)
    assert_all_same(everything(other), everything(one))


class Nested(Gpt):
    """Calls with tuples and dicts, a skipped block, and a loss in the output."""

    def forward(self, x, labels=None, skip=()):
        hidden = self.embedding(x)
        for i, layer in enumerate(self.layers):
            if i not in skip:
                hidden, _ = layer(hidden, torch.zeros_like(hidden))
        output = self.head(hidden)
        return {"loss": None if labels is None else loss_of(output, labels), "output": output}


def test_what_the_engine_is_called_with():
    torch.manual_seed(0)
    model = Nested()
    engine = wrap(model, gradient_accumulation_steps=2)
    data = batches(2)
    losses = [loss.item() for loss in engine.accumulate([{"x": x, "labels": x} for x in data])]
    engine.optimizer.zero_grad()
    tuples = engine.accumulate([(x, x) for x in data], lambda output, batch: loss_of(output["output"], batch[1]))
    engine.optimizer.zero_grad()
    plain = engine.accumulate(data, lambda output, batch: loss_of(output["output"], batch), blocks=[*model.layers])
    assert losses == [loss.item() for loss in tuples] == [loss.item() for loss in plain]
    assert not any(loss.requires_grad for loss in plain)


def test_functions_that_return_a_loss():
    """Each calls the engine, or its module, where it likes, and stops before each block until the others are there."""
    one, other = pair(3)
    data, events = batches(3), []

    def run(model, i):
        events.append(f"{i} begins")
        loss = loss_of(model(data[i]), data[i])
        events.append(f"{i} ends")
        return loss

    losses, _ = loop(one, data)
    calls = [partial(run, model, i) for i, model in enumerate((other, other.module, other))]
    assert [loss.item() for loss in other.accumulate(calls)] == losses
    other.step()
    assert_all_same(everything(other), everything(one))
    assert events == [f"{i} {what}" for what in ("begins", "ends") for i in range(3)]
    with pytest.raises(ParameterError, match=r"micro-batches are functions, .* and loss= is a function, too; expected"):
        other.accumulate(calls, loss_of)
    with pytest.raises(
        ParameterError, match=r"micro-batch 1 is a tensor, and micro-batch 0 is a function; expected all"
    ):
        other.accumulate([calls[0], data[0]])
    with pytest.raises(ParameterError, match=r"a micro-batch is .*; or a function that returns its loss"):
        other.accumulate([3])


@pytest.mark.parametrize("fields", [{}, STAGE_3], ids=["whole", "stage 3"])
def test_blocks_that_are_skipped(fields):
    """By all micro-batches, and by one of them."""
    for skips in [[(1,), (1,)], [(), (1,)], [(2,), (0,)]]:
        engines = []
        for _ in range(2):
            torch.manual_seed(0)
            engines.append(wrap(Nested(), lr=1e-2, gradient_accumulation_steps=2, **fields))
        one, other = engines
        given = [{"x": x, "labels": x, "skip": skip} for x, skip in zip(batches(2), skips, strict=True)]
        for each in given:
            one.backward(one(**each)["loss"])
            one.step()
        other.accumulate(given)
        other.step()
        assert_all_same(everything(other), everything(one))


@pytest.mark.draws(1)
def test_blocks_between_releases_and_checkpoints(tmp_path, device):
    one, other = pair(2, **BF16)
    for step in range(3):
        loop(one, batches(2, step))
        by_blocks(other, batches(2, step))
        if place().type != "cpu":
            other.release()
            other.restore()
    other.save_checkpoint(tmp_path)
    later = wrap(made(1), lr=1e-2, gradient_accumulation_steps=2, layerwise=True, **BF16, **STAGE_3)
    later.load_checkpoint(tmp_path)
    for step in range(3, 6):
        loop(one, batches(2, step))
        by_blocks(later, batches(2, step))
    assert_all_same(everything(later), everything(one))


def test_an_engine_that_is_deleted_is_gone_at_once():
    """Without garbage collection: nothing of the micro-batches refers to it."""
    engine = wrap(made(), gradient_accumulation_steps=2, layerwise=True, **STAGE_3)
    by_blocks(engine, batches(2))
    left = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.states_on_host
@pytest.mark.draws(1)
@pytest.mark.long("four engines on a device that is late")
@pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")
@pytest.mark.parametrize("fields", [{}, {**STAGE_3, "reduce_bucket_size": 5000}], ids=["whole", "stage 3"])
def test_bytes_over_the_link_and_on_the_device_are_those_of_few_micro_batches(fields, accelerator):
    """A bf16 parameter's gradient leaves once, and the parameters of a block come twice; inputs of blocks wait on the
    host."""
    with on(simulated.NAME):
        sent, peaks = {}, {}
        for n in (1, 2, 8, 24):
            torch.manual_seed(0)
            layers = [nn.Embedding(64, 64), *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))]
            engine = wrap(
                nn.Sequential(*layers).to(simulated.NAME),
                gradient_accumulation_steps=n,
                layerwise=n > 1,
                host_activation_memory=(1 << 24) * (n > 2),
                **BF16,
                **fields,
            )
            numel = sum(param.numel() for param in engine.module.parameters())
            data = [torch.randint(64, (64,)).to(simulated.NAME) for _ in range(n)]
            for _ in range(2):
                engine.flush()
                began, before = allocated_before(), simulated.bytes_copied()
                torch.accelerator.reset_peak_memory_stats()
                engine.accumulate(data, lambda output, _: output.float().pow(2).mean())
                engine.step()
                engine.flush()
                peaks[n] = torch.accelerator.max_memory_allocated() - began
                sent[n] = [(now - old) / numel for now, old in zip(simulated.bytes_copied(), before, strict=True)]
            engine.close()
        assert sent[1][0] == pytest.approx(2, rel=0.01)
        assert sent[2][0] == pytest.approx(4, rel=0.01)
        assert sent[2][1] == pytest.approx(sent[1][1], rel=0.01)
        assert sent[2][1] == pytest.approx(4 if fields else 2, rel=0.15)
        assert peaks[24] <= 1.25 * peaks[8]  # a hidden state of each would be twice as much
