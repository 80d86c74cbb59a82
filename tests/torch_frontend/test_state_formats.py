"""Optimizer states in formats of fewer bytes, as a user of torch meets them."""

import copy

import pytest
import torch
from torch import nn

from frontends.torch import OffloadedAdamW, wrap
from offload_core.errors import StateError
from tests.support import state_formats
from tests.support.format_runs import assert_equal, batch, model, result, trained
from tests.support.late_stores import PARAMETERS_ON_DISK, STATES_ON_DISK

FORMATS = {
    "bf16": {"state_format": "bf16"},
    "8bit": {"state_format": "8bit"},
    "8bit, bf16 masters": {"state_format": "8bit", "master_dtype": "bfloat16"},
}
IN_STAGES = {
    "stage 2": {},
    "stage 3": {"stage": 3, "param_persistence_threshold": 0},
    "on the host": {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0},
    "states on disk": STATES_ON_DISK,
    "on disk": PARAMETERS_ON_DISK,
    "half on disk": {**PARAMETERS_ON_DISK, "nvme_host_bytes": 20_000, "reduce_bucket_size": 1000},
    "many buckets": {"reduce_bucket_size": 1000},
    "clipped": {"gradient_clipping": 1e9},
}


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", FORMATS.values(), ids=FORMATS)
def test_stages_and_buckets_change_no_bit(fields):
    expected = result(trained(**fields))
    for others in IN_STAGES.values():
        assert_equal(result(trained(**fields, **others)), expected)


@pytest.mark.states_in_memory
def test_bfloat16_states_are_views_that_may_be_written_to():
    engine = trained(state_format="bf16")
    state = engine.optimizer.state[engine.module[0].weight]
    assert {name: value.dtype for name, value in state.items()} == {
        "step": torch.float32, "master": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16
    }  # fmt: skip
    state["exp_avg"].zero_()
    assert not engine.optimizer.whole_states(engine.module[0].weight)["exp_avg"].any()


def test_8_bit_states_are_read_as_copies_and_replaced_by_assignment():
    engine = trained(state_format="8bit")
    param = engine.module[0].weight
    state = engine.optimizer.state[param]
    read = state["exp_avg"]
    assert read.shape == param.shape
    assert torch.equal(read.float(), engine.optimizer.whole_states(param)["exp_avg"])
    for write in (
        lambda: read.mul_(2),
        lambda: read.__setitem__(0, 1.0),
        lambda: torch.add(read, 1, out=read),
        lambda: read.copy_(read * 2),
        lambda: read.__imul__(2),
        lambda: read.data.zero_(),
        lambda: read.view(-1).zero_(),
        lambda: read[0].zero_(),
        lambda: read.T.zero_(),
        lambda: read.detach().mul_(0),
        lambda: read.unbind()[0].fill_(1),
        lambda: torch._foreach_zero_([read]),
        lambda: torch.nn.init.normal_(read),
        lambda: torch.zero_(input=read),
        lambda: torch.reshape(input=read, shape=(-1,)).zero_(),
    ):
        with pytest.raises(StateError, match=r"what was read is a copy; expected an assignment of new values: state"):
            write()
    assert {type(each) for each in (read * 2, read.clone(), read.float(), copy.deepcopy(read))} == {torch.Tensor}
    read.requires_grad_(False)
    assert torch.equal(state["exp_avg"], read)
    state["exp_avg"] = read * 4
    assert torch.equal(state["exp_avg"], read * 4), "a power of two changes the scales alone"
    del state["exp_avg"]
    assert not state["exp_avg"].any()
    with pytest.raises(StateError, match="expected"):
        state["exp_avg"] = torch.zeros(3)
    assert state["exp_avg_sq"].any()


def test_random_numbers_follow_a_parameters_name_without_wrappers():
    """A model that is compiled later, or no more, goes on with the same numbers; another name draws others."""

    def seeds(model):
        return [spec.seed for spec in OffloadedAdamW(model.named_parameters()).core.params]

    plain = model()
    compiled = torch.nn.Sequential(torch.compile(plain[0], backend="eager"), plain[1], plain[2])
    assert any("_orig_mod" in name for name, _ in compiled.named_parameters())
    assert seeds(compiled) == seeds(plain)
    assert len({*seeds(plain), *seeds(torch.nn.Sequential(plain))}) == 8


def test_fp32_states_of_torch_are_rounded_to_nearest():
    theirs = model().float()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        theirs(batch(step).float()).square().mean().backward()
        optimizer.step()
    mine = model().float()
    ours = OffloadedAdamW(mine.parameters(), lr=1e-2, state_format="8bit")
    ours.load_state_dict(optimizer.state_dict())
    for param, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[other][name].flatten().numpy()
            stored = state_formats.encode("float8", value, has_sign=name == "exp_avg")
            got = ours.state[param][name].float().flatten().numpy()
            assert (got == state_formats.decode(stored)).all(), name


@pytest.mark.states_in_memory
def test_memory_report_shows_the_bytes_of_each_state():
    engine = trained(state_format="8bit", stage=3, offload_param="cpu", param_persistence_threshold=0)
    host = {row.what: row.held for row in engine.memory_report().rows if row.where == "host"}
    padded = host["parameters on the host"] // 2
    assert host["master"] == padded * 17 // 8
    assert host["exp_avg"] == host["exp_avg_sq"] == padded + padded // 256


def live_or_copied(tmp_path):
    """Each kind of memory that states may be in, and a mixture."""
    yield from FORMATS.values()
    yield {"master_dtype": "bfloat16", "param_dtype": "bfloat16"}
    yield {"offload_optimizer": "nvme", "nvme_path": tmp_path}
    yield {"optimizer": "muon", "state_format": "8bit"}  # its momentum is in fp32, and AdamW's moments in 8 bits
    yield {"optimizer": "sgd", "momentum": 0.9, "state_format": "bf16", "param_dtype": "bfloat16"}


def test_a_state_dict_that_is_kept_is_of_one_moment_or_of_now(tmp_path):
    for fields in live_or_copied(tmp_path):
        torch.manual_seed(0)
        engine = wrap(nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)), lr=1e-2, **fields)

        def train(engine=engine):
            engine.backward(engine(torch.arange(8)).float().square().sum())
            engine.step()

        train()
        kept = engine.optimizer.state_dict()
        before = copy.deepcopy(kept)
        train()
        now = engine.optimizer.state_dict()
        states = [(i, name) for i, entry in kept["state"].items() for name in entry]
        assert {name for _, name in states} & {"exp_avg", "momentum_buffer"}

        def same(one, other, states=states):
            return [torch.equal(one["state"][i][name], other["state"][i][name]) for i, name in states]

        assert not any(same(before, now))
        assert all(same(kept, before)) or all(same(kept, now)), fields
        engine.close()
