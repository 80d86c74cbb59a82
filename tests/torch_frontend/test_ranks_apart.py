"""Ranks that leave out different parameters: between a backward and its step, one has begun exchanges of gradients that
another has not."""

import pytest
import torch
from torch import nn

from frontends.torch import export_deepspeed, wrap
from tests import sampling
from tests.support.processes import on_ranks
from tests.support.torch_rank import bits, said_by


class Apart(nn.Module):
    """Each rank uses the first layer, and one that is its own; the last is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.own = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x, rank):
        return self.own[rank](self.shared(x)) + self.frozen(x)


CALLS = {
    "named_weights": lambda engine, folder: dict(engine.named_weights()),
    "master weights": lambda engine, folder: dict(engine.named_weights(dtype="float32")),
    "whole_state_dict": lambda engine, folder: engine.whole_state_dict(),
    "export_safetensors": lambda engine, folder: engine.export_safetensors(folder / "exported"),
    "export_deepspeed": lambda engine, folder: export_deepspeed(engine, folder / "universal"),
    "torch_state_dict": lambda engine, folder: engine.optimizer.torch_state_dict(),
    "whole_states": lambda engine, folder: engine.optimizer.whole_states(engine.module.shared.weight),
    "whole_gradient": lambda engine, folder: engine.optimizer.whole_gradient(engine.module.own[0].weight),
    "memory_report": lambda engine, folder: engine.memory_report(),
    "flush": lambda engine, folder: engine.flush(),
    "state_dict": lambda engine, folder: (engine.state_dict(), engine.optimizer.state_dict()),
    "unfreeze": lambda engine, folder: engine.module.frozen.requires_grad_(True),
    "missing": lambda engine, folder: engine.load_checkpoint(folder / "nothing", missing_ok=True),
    "zero_grad": lambda engine, folder: engine.zero_grad(),
}
REFUSED = {
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder / "saved"),
    "release": lambda engine, folder: engine.release(),
}


def trained(rank, folder, name="", call=lambda engine, folder: None, **fields):
    """The bits after two steps, and the error that the call before the second step has raised."""
    engine = wrap(Apart(), lr=1e-2, reduce_bucket_size=72, **fields)

    def backward(seed):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * seed + rank))
        engine.backward(engine(x, rank).square().sum())

    backward(0)
    engine.step()
    if name == "zero_grad":
        backward(9)  # is discarded
    else:
        backward(1)
    said = said_by(lambda: call(engine, folder))
    if name == "zero_grad" and said is None:
        backward(1)
    engine.step()
    engine.flush()
    found = bits(engine.module)
    engine.close()
    return found, said


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="stage 2"),
        pytest.param(
            {"stage": 1, "schedule": "delayed", "delay_warmup_steps": 1}, id="delayed", marks=pytest.mark.slow
        ),
        pytest.param({"update_in_backward": True, "gradient_clipping": 1e9}, id="sent early", marks=pytest.mark.slow),
    ],
)
def test_a_call_of_all_ranks_between_backward_and_step_changes_no_bit_of_the_step(tmp_path, fields, drawn):
    names = drawn([*CALLS, *REFUSED], sampling.least(len(CALLS) + len(REFUSED)))

    @on_ranks(2)
    def _(rank):
        delayed = fields.get("schedule") == "delayed"
        expected, _ = trained(rank, tmp_path, **fields)
        flushed, _ = trained(rank, tmp_path, "flush", CALLS["flush"], **fields)
        for name in names:
            found, said = trained(rank, tmp_path, name, {**CALLS, **REFUSED}[name], **fields)
            refused = name in REFUSED or (name == "state_dict" and said and "update_in_backward" in fields)  # it reads
            assert ("StateError" in said) if refused else (said is None), (name, said)
            if name != "unfreeze" and not (delayed and name == "zero_grad"):
                assert found in ({expected, flushed} if delayed else {expected}), name  # a read ends a delay


def test_where_updates_are_made_in_backward_a_call_is_refused_on_all_ranks_and_the_step_follows(tmp_path):
    @on_ranks(2)
    def found(rank):
        expected, _ = trained(rank, tmp_path, update_in_backward=True)
        said_of_each = {}
        for name in ("named_weights", "export_safetensors", "flush", "save_checkpoint", "release", "zero_grad"):
            bits_of_it, said = trained(rank, tmp_path, "", {**CALLS, **REFUSED}[name], update_in_backward=True)
            assert bits_of_it == expected, name
            said_of_each[name] = said.partition(":")[0]
        return said_of_each

    assert all({*said.values()} == {"StateError"} for said in found), found


@pytest.mark.draws(1)
@pytest.mark.parametrize("stage", [1, 2])
def test_an_engine_can_be_closed_after_a_backward_that_has_updated_states_on_one_rank_alone(stage):
    @on_ranks(2)
    def found(rank):
        model = Apart()
        engine = wrap(model, lr=1e-2, stage=stage, update_in_backward=True)
        x = torch.ones(4, 8)
        engine.backward((engine(x, 0) + model.own[1](x) if rank else model.own[1](x)).square().sum())
        engine.close()
        again = wrap(model, lr=1e-2, stage=stage)
        again.backward(again(x, rank).square().sum())
        return again.step().updated, bits(again.module)

    assert found[0] == found[1]
    assert found[0][0]


def in_backwards(rank, folder, *losses, call=lambda engine, folder: None, **fields):
    """The bits after three steps of several backwards, by functions of the engine that make their losses; parameters
    are read by these alone."""
    engine = wrap(Apart(), lr=1e-2, reduce_bucket_size=72, **fields)
    for _ in range(3):
        for loss in [loss(engine) for loss in losses]:
            engine.backward(loss)
        call(engine, folder)
        engine.step()
    engine.flush()
    found = bits(engine.module)
    engine.close()
    return found


def nothing(engine):
    return torch.zeros((), requires_grad=True).square()


def through(*names):
    """A loss that has gradients of these modules' parameters."""
    return lambda engine: sum(p.sum() for name in names for p in engine.module.get_submodule(name).parameters())


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="stage 2"),
        pytest.param({"schedule": "delayed"}, id="delayed", marks=pytest.mark.slow),
        pytest.param({"update_in_backward": True, "gradient_clipping": 1e9}, id="sent early", marks=pytest.mark.slow),
    ],
)
def test_a_rank_without_gradients_goes_on_while_the_last_step_is_under_way(tmp_path, fields, drawn):
    reads = ["whole_gradient", "named_weights", "whole_state_dict", "flush"]
    names = drawn(reads, sampling.least(len(reads)))

    @on_ranks(2)
    def _(rank):
        loss = through("shared", "own.0") if rank else nothing
        expected = in_backwards(rank, tmp_path, loss, **fields)
        for name in names:
            found = in_backwards(rank, tmp_path, loss, call=CALLS[name], **fields)
            assert found == expected or "schedule" in fields  # a read ends a delay


@pytest.mark.draws(2)
@pytest.mark.parametrize("clipping", [None, 1e9])
@pytest.mark.parametrize(
    "parts", [(["shared"], ["own.0", "own.1"]), (["own.0"], ["shared"]), (["shared", "own.1"], ["own.0"])]
)
def test_where_parameters_are_sent_early_two_backwards_over_other_parameters_are_one_step(tmp_path, parts, clipping):
    fields = {"update_in_backward": True, "gradient_clipping": clipping}

    @on_ranks(2)
    def _(rank):
        both = in_backwards(rank, tmp_path, through(*parts[0]), through(*parts[1]), gradient_clipping=clipping)
        assert in_backwards(rank, tmp_path, through(*parts[0]), through(*parts[1]), **fields) == both


def test_a_backward_that_fails_at_once_on_one_rank_may_be_tried_again(tmp_path):
    @on_ranks(2)
    def _(rank):
        def tried_twice(engine):
            if rank == 0:
                with pytest.raises(RuntimeError, match="does not require grad"):
                    engine.backward(torch.zeros(()))
            return through("shared", "own.1")(engine)

        expected = in_backwards(rank, tmp_path, through("shared", "own.1"), through("own.0"))
        assert in_backwards(rank, tmp_path, tried_twice, through("own.0")) == expected
