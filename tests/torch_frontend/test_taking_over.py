"""A new optimizer over the parameters of an earlier one: it takes over from an idle one, and else is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from frontends.torch import OffloadedAdamW, wrap
from offload_core.errors import StateError
from tests.support.processes import on_ranks
from tests.support.torch_models import assert_same, loss_of, make, same_bits, step, train

WAYS = {
    "alone": lambda m: OffloadedAdamW(m.parameters()),
    "early": lambda m: OffloadedAdamW(m.parameters(), early_copy=True),
    "engine": lambda m: wrap(m).optimizer,
}
KEPT = "'0.weight' already belongs to another OffloadedAdamW, {}; expected one owner: use the earlier one, or end"


@pytest.mark.draws(2)
@pytest.mark.quick
@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_an_optimizer_takes_over_with_new_states_as_torch_lets_it(first, second):
    ours, theirs = make(), make()
    earlier, before = WAYS[first](ours), torch.optim.AdamW(theirs.parameters(), fused=True)
    train(ours, earlier, range(3))
    train(theirs, before, range(3))
    mine, yours = WAYS[second](ours), torch.optim.AdamW(theirs.parameters(), fused=True)
    train(ours, mine, range(3, 6))
    train(theirs, yours, range(3, 6))
    assert_same(ours, theirs, mine, yours)
    for use in (earlier.step, earlier.zero_grad, earlier.state_dict, earlier.flush):
        with pytest.raises(StateError, match="a later one was made of its parameters; expected that one to be used"):
            use()
    earlier.close()
    train(ours, mine, range(1))


def test_an_earlier_one_is_flushed_first():
    """The delayed schedule holds the last step's parameters back."""
    models = [make(), make()]
    engines = [wrap(model, schedule="delayed", delay_warmup_steps=1) for model in models]
    for seed in range(3):
        for engine in engines:
            step(engine, seed)
    engines[0].flush()
    OffloadedAdamW(models[1].parameters())
    assert_same(*models)


def test_one_that_gave_way_still_says_so_after_its_own_close():
    model = make()
    first, later = OffloadedAdamW(model.parameters()), OffloadedAdamW(model.parameters())
    for _ in range(2):
        with pytest.raises(StateError, match="closed, because a later one was made of its parameters"):
            first.step()
        first.close()
    later.close()
    with pytest.raises(StateError, match="this optimizer was closed; expected an open one"):
        later.step()


def test_it_takes_over_from_several_and_when_it_gets_parameters_later():
    model = make()
    first, last = OffloadedAdamW(model[0].parameters()), OffloadedAdamW(model[2].parameters())
    both = OffloadedAdamW(model.parameters())
    assert [len(each.slots) for each in (first, last, both)] == [0, 0, 4]
    head = OffloadedAdamW(make()[2].parameters())
    head.add_param_group({"params": [*model.parameters()]})
    assert [len(each.slots) for each in (both, head)] == [0, 6]
    model[0].requires_grad_(False)
    unfreezing = OffloadedAdamW([*model.parameters(), *head.param_groups[0]["params"]])
    model[0].requires_grad_(True)
    train(model, unfreezing, range(1))
    assert len(unfreezing.slots) == 6


def test_an_earlier_one_that_is_not_idle_or_has_other_parameters_keeps_them():
    model = make()
    engine = wrap(model)

    def refused(said, params=None):
        params = [*model.named_parameters()] if params is None else params
        with pytest.raises(StateError, match=KEPT.format(said)):
            OffloadedAdamW(params)

    refused(r"which also has '2.weight', '2.bias', and this one does not", [*model.named_parameters()][:2])
    refusing = model[0].weight.register_hook(lambda gradient: refused("which is running"))
    loss_of(engine, 0).backward()  # its own backward says it, too
    refusing.remove()
    waits = "which is not idle: gradients wait for its update"
    refused(waits)
    engine.step()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    hook = engine.optimizer.register_step_pre_hook(lambda *_: refused(waits))
    step(engine, 1)
    hook.remove()
    with pytest.raises(StateError, match="of which this one is a shallow copy"):
        copy.copy(OffloadedAdamW([nn.Parameter(torch.ones(4))]))
    assert not any(same_bits(p, before[name]) for name, p in model.named_parameters())


def test_parameters_in_shards_are_kept_until_their_engine_is_closed():
    model = make()
    engine = wrap(model, stage=3, offload_param="cpu", param_persistence_threshold=0)
    for again in (lambda: OffloadedAdamW(model.named_parameters()), lambda: wrap(model, stage=2)):
        with pytest.raises(StateError, match=KEPT.format(r"which has it in shards \(stage 3\).*")):
            again()
    engine.close()
    train(model, OffloadedAdamW(model.parameters()), range(1))


def test_ranks_take_over_together_or_not_at_all():
    @on_ranks(2)
    def found(rank):
        model = make()
        group = dist.group.WORLD
        earlier = OffloadedAdamW(model.parameters(), process_group=group)
        train(model, earlier, range(1))
        with pytest.raises(StateError, match=r"partitions its states over the ranks \[0, 1\], and this one does not"):
            OffloadedAdamW(model.parameters())
        later = wrap(model)
        train(model, later.optimizer, range(1))
        assert not earlier.slots
        later.close()
        alone = OffloadedAdamW(model.parameters()) if rank else None
        said = "belong to an earlier OffloadedAdamW on this rank" if rank else "are nobody's on this rank"
        with pytest.raises(StateError, match=f"parameters {said}, and it is otherwise on another"):
            wrap(model)
        if alone is not None:
            train(model, alone, range(1))

    assert found == [None, None]
