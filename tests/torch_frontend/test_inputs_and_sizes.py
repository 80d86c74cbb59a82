"""Gradients of chosen parameters, and parameters of another size, in every way in which an engine runs."""

import pytest
import torch

from frontends.torch import OffloadedAdamW, gathered_parameters, wrap
from offload_core import ParameterError, StateError
from tests.support.processes import on_ranks
from tests.support.torch_models import loss_of, make, same_bits, step
from tests.support.ways import STAGE_3, WAYS


@pytest.mark.draws(2)
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_gradients_of_chosen_parameters_are_those_of_torch(fields):
    engine, theirs = wrap(make(), lr=1e-2, **fields), make()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for seed in range(3):
        found = torch.autograd.grad(loss_of(engine, seed), [*engine.parameters()])
        for gradient, expected in zip(
            found, torch.autograd.grad(loss_of(theirs, seed), [*theirs.parameters()]), strict=True
        ):
            assert same_bits(gradient, expected)
        engine.backward(loss_of(engine, seed), inputs=[*engine.module[2].parameters()])
        engine.step()
        loss_of(theirs, seed).backward(inputs=[*theirs[2].parameters()])
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    with gathered_parameters(engine.parameters()):
        for p, q in zip(engine.parameters(), theirs.parameters(), strict=True):
            assert same_bits(p, q)


def grown(p):
    return torch.cat([p.data, p.data[:4]])


CHANGES = {
    "more rows": grown,
    "as many elements": lambda p: p.data.view(p.shape[1], p.shape[0]),
    "another type": lambda p: p.data.half(),
    "another order": lambda p: p.data.t().contiguous().t(),
}


@pytest.mark.draws(2)
@pytest.mark.parametrize("modifier_rank", [None, 0])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_parameter_of_another_size_is_named_where_it_is_gathered_and_training_goes_on(change, modifier_rank):
    engine, twin = (wrap(make(), lr=1e-2, **STAGE_3) for _ in range(2))
    weight = next(engine.module[2].parameters())
    said = (
        r"parameter '2\.weight' became \(\d+, \d+\) torch\.float\d\d inside gathered.*resize or cast the model before"
    )
    with pytest.raises(ParameterError, match=said), gathered_parameters(weight, modifier_rank=modifier_rank):
        weight.data = change(weight)
    for each in (engine, twin):
        step(each, 0)
    with gathered_parameters([*engine.parameters(), *twin.parameters()]):
        for p, q in zip(engine.parameters(), twin.parameters(), strict=True):
            assert same_bits(p, q)


def with_more_rows(model):
    """As ``resize_token_embeddings`` of transformers does it: the parameter stays the same object."""
    weight, bias = model[2].weight, model[2].bias
    weight.data, bias.data = (torch.cat([p.data, p.data[:8] * 0.5]) for p in (weight, bias))
    model[2].out_features += 8
    return model


@pytest.mark.draws(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "fields",
    [{"stage": 1}, {}, {"schedule": "serial"}, {"update_in_backward": True}, {"gradient_accumulation_steps": 2},
     {"state_format": "bf16"}, {"state_format": "8bit", "master_dtype": "bfloat16"}],
    ids=str,
)  # fmt: skip
def test_a_vocabulary_that_grows_before_the_first_update_trains_as_if_it_had_been_so_large(fields, dtype):
    """In bfloat16 rows that were there keep the low bits of their master weights; the new ones are bfloat16's."""
    if dtype == "float32":
        fields = {name: value for name, value in fields.items() if name != "master_dtype"}
    fields = {"lr": 1e-2, "param_dtype": dtype, **fields}
    engine, twin = wrap(make(), **fields), wrap(with_more_rows(make()), **fields)
    engine(torch.zeros(1, 32))  # an evaluation
    with torch.no_grad():
        with_more_rows(engine.module)
        for p, q in zip(engine.module[2].parameters(), twin.module[2].parameters(), strict=True):
            q.copy_(p)
            engine(torch.zeros(1, 32))
            twin.optimizer.load_master(q, engine.optimizer.whole_states(p)["master"])
            if not fields.get("master_dtype"):
                first = make()[2].get_parameter("weight" if p.dim() == 2 else "bias")
                assert same_bits(engine.optimizer.whole_states(p)["master"][:16], first)
    for seed in range(4):
        for each in (engine, twin):
            step(each, seed)
    engine.flush()
    for p, q in zip(engine.parameters(), twin.parameters(), strict=True):
        assert same_bits(p, q)
        for name, state in engine.optimizer.whole_states(p).items():
            assert same_bits(state, twin.optimizer.whole_states(q)[name])


def test_the_optimizer_alone_takes_parameters_that_have_grown_too():
    model, twin = make(), with_more_rows(make())
    ours, theirs = (
        OffloadedAdamW(model.parameters(), lr=1e-2),
        torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True),
    )
    with_more_rows(model)
    for seed in range(2):
        for each, optimizer in ((model, ours), (twin, theirs)):
            loss_of(each, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert same_bits(p, q)


def test_growing_after_an_update_is_named():
    engine = wrap(make(), lr=1e-2)
    step(engine, 0)
    engine.flush()
    with_more_rows(engine.module)
    with pytest.raises(ParameterError, match=r"'2.weight' is \(24, 64\) .* and was \(16, 64\)"):
        engine.backward(loss_of(engine, 0))


def test_ranks_grow_alike():
    @on_ranks(2)
    def found(rank):
        engine = wrap(make(), lr=1e-2, param_dtype="bfloat16")
        saver = engine.save_on_signal("nowhere")
        with_more_rows(engine.module)
        for seed in range(2):
            step(engine, seed)
        saver.close()
        return [engine.optimizer.whole_states(p)["master"] for p in engine.parameters()]

    alone = wrap(make(), lr=1e-2, param_dtype="bfloat16")
    with_more_rows(alone.module)
    for seed in range(2):
        step(alone, seed)
    for i, p in enumerate(alone.parameters()):
        for masters in found:
            assert same_bits(masters[i], alone.optimizer.whole_states(p)["master"])


def test_what_is_saved_right_after_growing_has_all_rows_and_is_loaded(tmp_path):
    engine = wrap(make(), lr=1e-2, param_dtype="bfloat16")
    running = engine.save_checkpoint(tmp_path / "before", wait=False)
    with_more_rows(engine.module)
    engine.save_checkpoint(tmp_path / "after")
    assert running.is_dir()
    fresh = wrap(make(), lr=1e-2, param_dtype="bfloat16")
    with_more_rows(fresh.module)
    fresh.load_checkpoint(tmp_path / "after")
    for p, q in zip(fresh.parameters(), engine.parameters(), strict=True):
        assert same_bits(p, q)
        assert same_bits(fresh.optimizer.whole_states(p)["master"], engine.optimizer.whole_states(q)["master"])


def test_growing_into_memory_of_another_is_an_error_after_which_the_model_is_wrapped_anew():
    engine = wrap(make(), lr=1e-2)
    memory = torch.zeros(80, 64)
    engine.module[0].weight.data, engine.module[2].weight.data = memory.view(-1)[: 64 * 32].view(64, 32), memory
    with pytest.raises(ParameterError, match="lie over one memory"):
        engine(torch.zeros(1, 32))
    with pytest.raises(StateError, match="closed; expected an open one: wrap the model anew"):
        engine.step()
    engine.module[0].weight.data = torch.zeros(64, 32)
    wrap(engine.module, lr=1e-2)
