"""Stage 3 in torch on one rank, its parameters in host memory: the bits of stage 2, and bounded device memory."""

import collections
import copy
import gc
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from frontends.torch import OffloadedAdamW, gathered_parameters, init, wrap
from frontends.torch.params.pending import PendingParameter
from frontends.torch.ranks import device_ranks
from offload_core import ConfigError, ParameterError, StateError
from offload_core.plans.planner import Planner
from tests.support.experts import Experts, mixture, rows
from tests.support.late_stores import parameters_on_disk_too
from tests.support.partitioned_models import external, external_loss, gpt, gpt_loss, llama, llama_loss
from tests.support.slow_torch_device import SlowTorchDevice
from tests.support.strategies import law
from tests.support.torch_models import place

WIDTH = 4
STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 1}
SIMULATED = "simulated, delays 0"
NARROW = {**STAGE_3, "max_live_parameters": 4000, "prefetch_bucket_size": 2500, "max_reuse_distance": 3000}


rarely_on_disk = pytest.mark.parametrize(
    "store", ["memory", pytest.param("nvme", marks=pytest.mark.slow)], indirect=True
)
everywhere = pytest.mark.usefixtures("device")
rarely = pytest.mark.parametrize(
    "device", ["host", pytest.param("simulated, delays 0", marks=pytest.mark.slow)], indirect=True
)
"""Laws to which others hold on the simulated device at every change: compiled blocks in stage 3, and a GPT."""


def live(engine):
    return engine.optimizer.sharding.live


def held(model):
    """Bytes that the parameters' storages have now."""
    with torch._C.DisableTorchFunctionSubclass():  # it is no read
        return sum(p.untyped_storage().nbytes() for p in model.parameters())


def released(engine):
    parted = engine.optimizer.sharding
    whole = sum(p.nbytes for p in engine.parameters() if p not in parted)
    return parted.live.numel == parted.live.n_bytes == 0 and held(engine) == whole


def values(engine):
    with gathered_parameters(engine.module.parameters()):
        return [p.detach().clone() for p in engine.parameters()]


def train(engine, loss_of, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# --- random module trees ------------------------------------------------------------------------------


class Leaf(nn.Linear):
    """A leaf of a tree. A wider one has more parameters."""

    def __init__(self, hidden):
        super().__init__(WIDTH, hidden)
        self.back = nn.Parameter(torch.randn(hidden, WIDTH) * 0.3)

    def forward(self, x, skipped):
        return torch.tanh(super().forward(x) @ self.back)


class Node(nn.Module):
    """Runs its children, some of them again and some not at all, maybe under checkpointing; has a weight of its own and
    maybe uses one of a child's."""

    def __init__(self, children, order, scale, borrows, checkpoints):
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.order = order
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5) if scale else None
        self.borrows = borrows
        self.checkpoints = checkpoints

    def run(self, x, skipped):
        for i in self.order:
            if i % 3 != skipped:
                x = x + self.parts[i % len(self.parts)](x, skipped)
        return x

    def forward(self, x, skipped):
        if self.checkpoints is None or not torch.is_grad_enabled():
            x = self.run(x, skipped)
        else:
            x = checkpoint(self.run, x, skipped, use_reentrant=self.checkpoints)
        leaves = [part for part in self.parts if isinstance(part, Leaf)]
        if self.borrows and leaves:
            x = x + F.linear(x, leaves[0].weight[:WIDTH])
        return x if self.scale is None else x * self.scale


@st.composite
def trees(draw):
    """Draw the plan of a tree, as nested tuples. A leaf or a node may occur several times."""
    made = []

    def build(depth):
        if made and draw(st.integers(0, 3)) == 0:
            return ("again", draw(st.integers(0, len(made) - 1)))
        if depth == 0 or draw(st.booleans()):
            made.append(None)
            return ("leaf", len(made) - 1, draw(st.sampled_from([4, 7, 16])), draw(st.integers(0, 5)) == 0)
        parts = [build(depth - 1) for _ in range(draw(st.integers(1, 3)))]
        made.append(None)
        order = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        how = draw(st.sampled_from([None, None, False, True]))
        return ("node", len(made) - 1, parts, order, draw(st.booleans()), draw(st.booleans()), how)

    parts = [build(2) for _ in range(draw(st.integers(1, 3)))]
    return ("node", len(made), parts, [0, 1, 2, 4, 5, 7], draw(st.booleans()), draw(st.booleans()), None)


def plant(tree):
    torch.manual_seed(0)
    made = {}

    def build(tree):
        kind, number, *rest = tree
        if kind == "again":
            return made[number]
        if kind == "leaf":
            hidden, frozen = rest
            made[number] = Leaf(hidden).requires_grad_(not frozen)
        else:
            parts, order, scale, borrows, how = rest
            made[number] = Node([build(part) for part in parts], order, scale, borrows, how)
        return made[number]

    root = nn.ModuleDict({"tree": build(tree), "head": nn.Linear(WIDTH, 3)})
    return root


class Rooted(nn.Module):
    def __init__(self, tree):
        super().__init__()
        parts = plant(tree)
        self.tree, self.head = parts["tree"], parts["head"]

    def forward(self, x, skipped):
        return self.head(self.tree(x, skipped)).pow(2).mean()


def own(module):
    borrowed = module.__dict__.get("_offload_external_parameters", [])
    return {id(p): p.numel() for p in [*module.parameters(recurse=False), *borrowed]}


def deepest(module, above=frozenset()):
    """The most elements that a module, what runs it and what that borrows have."""
    held = dict(above) | own(module)
    return max([sum(held.values()), *(deepest(child, held.items()) for child in module.children())])


@rarely_on_disk
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@law(30)
@given(
    tree=trees(),
    fields=st.fixed_dictionaries(
        {
            "max_live_parameters": st.sampled_from([0, 60, 150, 10**9]),
            "prefetch_bucket_size": st.sampled_from([0, 40, 100, 10**9]),
            "max_reuse_distance": st.sampled_from([0, 50, 10**9]),
            "param_persistence_threshold": st.sampled_from([0, 5, 20]),
            "gradient_accumulation_steps": st.sampled_from([1, 2]),
        }
    ),
    skips=st.lists(st.sampled_from([0, 1, 2, 3]), min_size=3, max_size=4),
    input_has_gradient=st.booleans(),
    slow=st.booleans(),
)
def test_any_tree_trains_to_the_same_bits_within_its_window(tree, fields, skips, input_has_gradient, slow):
    def run(config):
        torch.manual_seed(1)
        engine = wrap(Rooted(tree), lr=1e-2, **config)
        losses = []
        for step, skipped in enumerate(skips):
            for _ in range(config["gradient_accumulation_steps"]):
                x = torch.randn(3, WIDTH, requires_grad=input_has_gradient)
                loss = engine(x, skipped)
                engine.backward(loss)
                report = engine.step()
            with torch.no_grad() if step % 2 else torch.inference_mode():
                losses += [loss.item(), engine(x.detach(), skips[step - 1]).item()]
        assert report.updated
        return engine, losses

    expected, expected_losses = run({"gradient_accumulation_steps": fields["gradient_accumulation_steps"]})
    with pytest.MonkeyPatch.context() as patch:
        if slow:
            patch.setattr(device_ranks, "memory_of", lambda device: SlowTorchDevice(delay=1e-4))
        engine, losses = run({**STAGE_3, **fields})
        assert losses == expected_losses
        assert live(engine).numel == 0
        bound = deepest(engine.module)
        checkpoints = any(getattr(module, "checkpoints", None) is not None for module in engine.modules())
        # A run that is computed again holds its first modules beside the one whose backward asked for it.
        assert live(engine).peak_numel <= max(fields["max_live_parameters"], bound * (2 if checkpoints else 1))
        for ours, theirs in zip(values(engine), expected.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        engine.close()
    for ours, theirs in zip(engine.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# --- what users do ------------------------------------------------------------------------------------


def pair(make, **fields):
    """The same model in stage 2 and in stage 3."""
    with place():
        models = make(), make()
    parted = NARROW | {"param_persistence_threshold": 40} | fields
    return wrap(models[0], lr=1e-2, **fields), wrap(models[1], lr=1e-2, **parted)


def inputs(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(place()).requires_grad_()


def assert_same(plain, parted):
    for ours, theirs in zip(values(parted), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(parted.optimizer.state.values(), plain.optimizer.state.values(), strict=True):
        for name in {"exp_avg", "exp_avg_sq", "step"}:
            assert torch.equal(ours[name], theirs[name])


@pytest.mark.draws(2)
@parameters_on_disk_too
@pytest.mark.quick
@pytest.mark.parametrize(
    ("device", "fields"),
    [
        ("host", {"param_dtype": "bfloat16", "gradient_clipping": 0.1}),
        ("host", {"schedule": "delayed", "delay_warmup_steps": 2}),
        ("late", {"schedule": "delayed", "delay_warmup_steps": 2, "param_dtype": "float16"}),
        ("late", {"update_in_backward": True, "param_dtype": "bfloat16"}),
        ("late", {"schedule": "serial", "adam_mode": "adam"}),
        (SIMULATED, {"gradient_clipping": 0.1}),
        (SIMULATED, {"schedule": "delayed", "delay_warmup_steps": 2, "param_dtype": "float16"}),
        (SIMULATED, {"update_in_backward": True, "param_dtype": "bfloat16"}),
    ],
    indirect=["device"],
    ids=str,
)
def test_every_schedule_and_element_type_gives_the_bits_of_stage_2(device, fields):
    plain, parted = pair(gpt, **fields)
    assert train(plain, gpt_loss, 6) == train(parted, gpt_loss, 6)
    plain.flush()
    parted.flush()
    assert_same(plain, parted)


def raising(*args):
    raise ZeroDivisionError


def test_a_forward_that_fails_on_a_parameter_that_was_replaced_names_it():
    engine = wrap(gpt(), lr=1e-2, **STAGE_3 | {"param_persistence_threshold": 40})
    train(engine, gpt_loss, 1)
    [name, whole] = next((n, p) for n, p in engine.module.named_parameters() if p not in engine.optimizer.sharding)
    values, whole.data = whole.data, whole.data.double()
    with pytest.raises(ParameterError, match=f"{name!r} is .*float64 .*, and was .*float32 .*before wrap"):
        gpt_loss(engine, 5)
    whole.data = values
    train(engine, gpt_loss, 1)


@pytest.mark.draws(1)
@parameters_on_disk_too
@pytest.mark.parametrize("device", ["host", "late", SIMULATED], indirect=True)
def test_after_an_error_in_forward_or_backward_nothing_is_whole_and_training_goes_on(device):
    plain, parted = pair(gpt)
    train(parted, gpt_loss, 1)
    hook = parted.module.blocks[1].mlp_norm.register_forward_hook(raising)
    with pytest.raises(ZeroDivisionError):
        gpt_loss(parted, 5)
    assert released(parted)
    hook.remove()
    hook = parted.module.blocks[1].mlp_norm.weight.register_hook(raising)
    with pytest.raises(ZeroDivisionError):
        parted.backward(gpt_loss(parted, 5))
    assert released(parted)
    hook.remove()
    parted.optimizer.zero_grad()
    loss = gpt_loss(parted, 5)  # a forward whose backward never comes
    assert not released(parted)
    del loss
    train(parted, gpt_loss, 3, first=1)
    assert released(parted)
    train(plain, gpt_loss, 4)
    assert_same(plain, parted)


def test_a_failed_update_is_an_error_of_the_forward_that_needs_it(monkeypatch):
    device = SlowTorchDevice()
    monkeypatch.setattr(device_ranks, "memory_of", lambda torch_device: device)
    engine = wrap(gpt(), lr=1e-2, **STAGE_3)
    device.fails = True
    with pytest.raises(OSError, match="as asked"):
        gpt_loss(engine, 0)
    device.fails = False
    assert released(engine)
    train(engine, gpt_loss, 2)


def test_who_touches_a_released_parameter_is_told_which_and_what_to_do():
    engine = wrap(gpt(), **STAGE_3)
    model = engine.module
    for read in (
        lambda: model.blocks[1].mlp_in.weight.sum(),
        model.blocks[1].mlp_in.state_dict,
        lambda: copy.deepcopy(model.blocks[1].mlp_in),
        model.blocks[1].mlp_in.half,
    ):
        with pytest.raises(
            StateError, match=r"'blocks.1.mlp_in.weight' of Linear 'blocks.1.mlp_in'.*gathered_parameters"
        ):
            read()
    assert isinstance(model.blocks[1].mlp_in.weight, PendingParameter)
    assert model.blocks[1].mlp_in.weight.shape == (128, 32)
    assert released(engine)


@pytest.mark.draws(1)
@everywhere
def test_whole_parameters_can_be_read_and_what_was_read_stays():
    engine, model = wrap(gpt(), **STAGE_3), gpt()
    with gathered_parameters(engine.module.parameters()):
        found = engine.module.state_dict()
        with gathered_parameters(engine.module.embedding.weight):
            pass
        engine(torch.zeros(1, 4, dtype=torch.int64, device=place()))
        engine.backward(gpt_loss(engine, 0))
        with pytest.raises(StateError, match="inside gathered_parameters"):
            engine.step()
    assert released(engine)
    assert engine.step().updated
    assert list(found) == list(model.state_dict())
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


@pytest.mark.draws(1)
@parameters_on_disk_too
@everywhere
def test_changes_are_kept_where_a_modifier_is_named_and_refused_where_not():
    plain, parted = pair(external, param_dtype="bfloat16")
    train(plain, external_loss, 2)
    train(parted, external_loss, 2)

    def change(model, scale):
        with torch.no_grad():
            for p in [model.embedding.weight, model.blocks[0].first.bias]:
                p[:8].mul_(scale)
            model.scale.weight.data = model.scale.weight.data * scale

    def places(model):
        return [model.embedding.weight, model.blocks[0].first.bias, model.scale.weight]

    with (
        pytest.raises(StateError, match="'embedding.weight' was changed.*modifier_rank=0"),
        gathered_parameters(places(parted.module)),
    ):
        change(parted.module, 3.0)
    assert_same(plain, parted)
    change(plain.module, 1.5)
    with gathered_parameters(parted.module.parameters()), gathered_parameters(places(parted.module), modifier_rank=0):
        change(parted.module, 1.5)
    assert released(parted)
    train(plain, external_loss, 2, first=2)
    train(parted, external_loss, 2, first=2)
    assert_same(plain, parted)


@pytest.mark.draws(1)
@rarely_on_disk
@everywhere
@pytest.mark.parametrize("modifier_rank", [None, 0])
def test_a_change_that_is_lost_is_read_by_nobody(modifier_rank):
    plain, parted = wrap(gpt(), lr=1e-2), wrap(gpt(), lr=1e-2, **STAGE_3)
    train(plain, gpt_loss, 2)
    train(parted, gpt_loss, 2)
    loss = gpt_loss(parted, 2)  # what it used is used again in backward, and stays whole till then
    weight = parted.module.embedding.weight

    @torch.no_grad()
    def change():
        weight.mul_(2.0)
        if modifier_rank is not None:
            raise ZeroDivisionError

    with pytest.raises((StateError, ZeroDivisionError)), gathered_parameters(weight, modifier_rank):
        change()
    with gathered_parameters(weight):
        assert torch.equal(weight, plain.module.embedding.weight)
    del loss
    assert_same(plain, parted)


class Gathers(nn.Module):
    """Gathers what it uses by hand, under checkpointing or not."""

    def __init__(self, checkpoints):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, 16)
        self.checkpoints = checkpoints

    def run(self, x):
        with gathered_parameters(self.inner.weight):
            return (x[:, None] * self.inner.weight).sum(-1)  # the graph refers to the parameter itself

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpoints else self.run(x)


@pytest.mark.draws(1)
@everywhere
@pytest.mark.parametrize("checkpoints", [False, True])
def test_backward_reads_what_was_gathered_by_hand(checkpoints):
    def penalised(engine, seed):
        loss = engine(inputs(3, WIDTH, seed=seed)).sum()
        with gathered_parameters(engine.module.parameters()):
            return loss + sum(p.pow(2).sum() for p in engine.module.parameters())

    plain, parted = pair(partial(Gathers, checkpoints))
    assert train(plain, penalised, 3) == train(parted, penalised, 3)
    assert_same(plain, parted)
    assert released(parted)


def test_the_modifier_must_be_a_rank():
    engine = wrap(gpt(), **STAGE_3)
    for rank in (1, "0"):
        with (
            pytest.raises(ParameterError, match=f"modifier_rank={rank!r}, expected None or one of the ranks 0 to 0"),
            gathered_parameters(engine.module.parameters(), modifier_rank=rank),
        ):
            pass
    assert released(engine)


@pytest.mark.draws(1)
@everywhere
def test_what_was_gathered_in_inference_mode_can_be_trained():
    plain, parted = pair(gpt)
    train(plain, gpt_loss, 2)
    train(parted, gpt_loss, 1)
    with torch.inference_mode(), gathered_parameters(parted.module.parameters()):
        parted.module.state_dict()
    train(parted, gpt_loss, 1, first=1)
    assert_same(plain, parted)


def test_copies_of_a_module_gather_nothing(monkeypatch):
    engine = wrap(gpt(), **STAGE_3)
    with gathered_parameters(engine.module.parameters()):
        copies = [copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))]
        expected = gpt_loss(engine, 0)
    loss = gpt_loss(engine, 0)
    monkeypatch.setattr(live(engine), "begin_round", pytest.fail)
    assert all(torch.equal(gpt_loss(model, 0), expected) for model in copies)  # perhaps on one rank only
    engine.backward(loss)
    assert engine.step().updated
    assert released(engine)


def test_another_engine_cannot_take_a_frozen_parameter_that_is_in_shards():
    first, second = gpt(), gpt()
    first.embedding.requires_grad_(False)
    second.embedding = first.embedding
    engine = wrap(first, **STAGE_3)
    with pytest.raises(StateError, match="'embedding.weight' is there in shards of another engine.*one owner.*close"):
        wrap(second, **STAGE_3)
    train(engine, gpt_loss, 2)
    values(engine)
    engine.close()
    train(wrap(second, **STAGE_3), gpt_loss, 1)


def drop_in_a_cycle(engine):
    """As a trainer that nobody has any more: only the collector of garbage finds it."""
    cycle = [engine]
    cycle.append(cycle)


USES = {
    "move": lambda model: model.to("cpu"),
    "read": lambda model: model.embedding.weight.sum().item(),
    "state_dict": lambda model: copy.deepcopy(model.state_dict()),
    "engine": lambda model: wrap(model, **STAGE_3),
    "optimizer": lambda model: OffloadedAdamW(model.parameters()),
    "engine, frozen": lambda model: wrap(nn.Sequential(model.requires_grad_(False), nn.Linear(2, 2)), **STAGE_3),
}


@pytest.mark.draws(2)
@pytest.mark.parametrize("use", USES)
def test_a_model_can_be_used_whose_engine_is_garbage(use):
    expected = [p.detach().clone() for p in gpt().parameters()]
    gc.disable()
    try:
        model = gpt()
        drop_in_a_cycle(wrap(model, **STAGE_3))
        new = USES[use](model)
    finally:
        gc.enable()
    with gathered_parameters(model.parameters()):
        assert [*map(torch.equal, model.parameters(), expected)] == [True] * len(expected)
    del new


MOVES = {
    "to": lambda model: model.to("cpu"),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "share_memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("move", MOVES)
def test_moving_or_casting_what_is_in_shards_says_what_to_do(move):
    with init(**STAGE_3):
        model = nn.Linear(4, 4)
    with pytest.raises(StateError, match=r"'Linear.weight', built in shards by init\(\), was to be moved or cast .*de"):
        MOVES[move](model)
    engine = wrap(model, **STAGE_3)
    for each in (engine, model):
        with pytest.raises(StateError, match="in shards; expected the device before .* or engine.close.. before an"):
            MOVES[move](each)
    engine.close()
    MOVES[move](model)


def test_a_parameter_of_another_module_is_noticed_once_and_then_known():
    engine = wrap(external(), **STAGE_3)
    touched = []
    runs = engine.optimizer.sharding.runs
    use = runs.use
    runs.use = lambda record: (touched.append(id(record.param)), use(record))[1]
    train(engine, external_loss, 1)
    assert touched == [id(engine.module.embedding.weight)]  # returned biases and registered ones are not touched
    train(engine, external_loss, 2)
    assert len(touched) == 1
    assert released(engine)


@pytest.mark.draws(1)
@everywhere
def test_hooks_of_the_user_see_whole_parameters():
    def run(engine):
        sums = []
        linear = engine.module.blocks[1].mlp_in
        see = lambda *args: sums.append(linear.weight.sum().item())  # noqa: E731
        linear.register_forward_pre_hook(see)
        linear.register_forward_hook(see)
        linear.register_full_backward_hook(see)
        linear.register_full_backward_pre_hook(see)
        linear.weight.register_hook(lambda g: g + linear.weight.sum())
        linear.weight.register_post_accumulate_grad_hook(see)
        train(engine, gpt_loss, 3)
        return sums

    plain, parted = pair(gpt)
    assert run(plain) == run(parted)
    assert_same(plain, parted)
    assert released(parted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, partial(torch.jit.trace, example_inputs=torch.ones(1, 64))])
def test_modules_that_run_no_hooks_are_refused_unless_their_parameters_stay_whole(compiled):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 64), compiled(nn.Sequential(nn.Linear(64, 1))))

    said = r"module '1' is compiled by TorchScript, .* gather its '0.weight' in stage 3; expected the Python module"
    with pytest.raises(ParameterError, match=said):
        wrap(model(), **STAGE_3)
    engine, plain = wrap(model(), **{**STAGE_3, "param_persistence_threshold": 65}), wrap(model(), stage=2)
    for each in (plain, engine):
        each.backward(each(torch.ones(2, 4)).square().mean())
        each.step()
    assert engine.module[0].weight in engine.optimizer.sharding
    engine.close()
    for p, q in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(p, q)


class TorchsOwn(nn.Module):
    """Modules that use a child's weight by themselves, keep weights in lists, or compute them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        y, _ = self.attention(x, x, x)
        y, _ = self.lstm(y)
        return self.layer(self.normed(y)).pow(2).mean() + self.conv(x.view(1, 4, 4, -1)).pow(2).mean()


def test_torch_s_own_modules_train_and_evaluate_alike():
    def loss_of(model, seed):
        torch.manual_seed(seed)
        return model(torch.randn(2, 8, 16))

    plain, parted = pair(TorchsOwn)
    assert train(plain, loss_of, 4) == train(parted, loss_of, 4)
    assert released(parted)
    assert_same(plain, parted)
    with torch.no_grad():
        assert loss_of(plain.eval(), 9) == loss_of(parted.eval(), 9)


@pytest.mark.integration
@rarely
@everywhere
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_a_llama_generates_and_recomputes_its_activations():
    plain, parted = pair(llama)
    for engine in (plain, parted):
        engine.module.gradient_checkpointing_enable()
        engine.train()
    assert train(plain, llama_loss, 2) == train(parted, llama_loss, 2)
    prompt = torch.tensor([[1, 2, 3]], device=place())
    for engine in (plain, parted):
        engine.eval()
    texts = [engine.module.generate(prompt, max_new_tokens=5, do_sample=False).tolist() for engine in (plain, parted)]
    assert texts[0] == texts[1]
    assert released(parted)


class Hidden:
    """An output in which nobody finds the tensor."""

    __slots__ = ("tensor",)


class Hides(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH))

    def forward(self, x):
        hidden = Hidden()
        hidden.tensor = torch.tanh(x @ self.weight)
        return hidden


def penalised(engine, seed, between):
    x = inputs(3, WIDTH, seed=seed)
    (gradient,) = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
    return between(engine, x) + gradient.pow(2).sum()


def hidden(engine, seed, between):
    x = inputs(3, WIDTH, seed=seed)
    output = engine(x)
    return between(engine, x) + output.tensor.sum()


def trained_between(engine, x):
    output = engine(-x)
    return output.tensor.sum() if isinstance(output, Hidden) else output.sum()


@torch.no_grad()
def evaluated_between(engine, x):
    engine(-x)
    return 0


@pytest.mark.draws(2)
@everywhere
@pytest.mark.parametrize("between", [trained_between, evaluated_between, lambda engine, x: 0])
def test_what_a_graph_may_read_again_is_kept_over_other_forwards(between):
    """No hook reports these reads: a gradient penalty is differentiated twice, and an output is hidden."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    for make_model, loss_of in [(make, penalised), (Hides, hidden)]:
        plain, parted = pair(make_model)
        losses = [train(engine, partial(loss_of, between=between), 3) for engine in (plain, parted)]
        assert losses[0] == losses[1]
        assert_same(plain, parted)
        assert released(parted)


@rarely
@everywhere
def test_backward_goes_through_a_kept_graph_again():
    plain, parted = pair(gpt)
    for engine in (plain, parted):
        for seed in range(2):
            loss = gpt_loss(engine, seed)
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()
    assert_same(plain, parted)


@rarely
@everywhere
def test_generation_of_varying_length_is_the_same():
    def generate(engine):
        x = torch.zeros(1, 1, dtype=torch.int64, device=place())
        with torch.no_grad():
            for length in (3, 1, 5):
                for _ in range(length):
                    x = torch.cat([x, engine(x)[:, -1:].argmax(-1)], 1)[:, -8:]
        return x.tolist()

    plain, parted = pair(gpt)
    for seed in range(2):
        train(plain, gpt_loss, 1, first=seed)
        train(parted, gpt_loss, 1, first=seed)
        assert generate(plain) == generate(parted)
        assert released(parted)


@pytest.mark.draws(1)
@parameters_on_disk_too
@everywhere
def test_frozen_parameters_are_partitioned_too_and_can_be_unfrozen():
    def make():
        model = gpt()
        model.blocks[0].requires_grad_(False)
        return model

    plain, parted = pair(make, param_dtype="bfloat16")
    report = parted.memory_report()
    if parted.offload_config.offload_param == "cpu":
        assert report.host["parameters on the host"] == sum(p.nbytes for p in parted.parameters() if p.numel() >= 40)
        assert report.host_bytes == report.planned_host_bytes
    for first in (0, 2):
        train(plain, gpt_loss, 2, first=first)
        train(parted, gpt_loss, 2, first=first)
        assert released(parted)
        assert_same(plain, parted)
        plain.module.blocks[0].requires_grad_(True)
        parted.module.blocks[0].requires_grad_(True)
    assert any(p is parted.module.blocks[0].qkv.weight for p in parted.optimizer.state)


@pytest.mark.draws(1)
@pytest.mark.parametrize("store", ["memory", "late", "nvme"], indirect=True)
@everywhere
def test_states_go_through_a_dictionary_and_torch_s_own_are_taken():
    plain, parted = pair(gpt)
    train(plain, gpt_loss, 2)
    fresh = wrap(gpt(), lr=1e-2, **STAGE_3)
    with gathered_parameters(fresh.module.parameters(), modifier_rank=0):
        fresh.module.load_state_dict(plain.module.state_dict())
    fresh.optimizer.load_state_dict(plain.optimizer.state_dict())
    train(plain, gpt_loss, 2, first=2)
    train(fresh, gpt_loss, 1, first=2)
    parted.optimizer.load_state_dict(fresh.optimizer.state_dict())
    with gathered_parameters(fresh.module.parameters()):
        whole = fresh.module.state_dict()
    with gathered_parameters(parted.module.parameters(), modifier_rank=0):
        parted.module.load_state_dict(whole)
    train(parted, gpt_loss, 1, first=3)
    assert_same(plain, parted)


@pytest.mark.draws(1)
@parameters_on_disk_too
@everywhere
@pytest.mark.parametrize("way", ["close", "collected"])
def test_afterwards_the_parameters_are_whole(way):
    engine, plain = wrap(gpt(), lr=1e-2, **STAGE_3), wrap(gpt(), lr=1e-2)
    train(engine, gpt_loss, 2)
    train(plain, gpt_loss, 2)
    model = engine.module
    if way == "close":
        engine.close()
    del engine
    gc.collect()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    wrap(model, **STAGE_3)


@pytest.mark.draws(1)
@rarely
@everywhere
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of dynamo's own making
@pytest.mark.parametrize("way", ["model", "engine", "in place"])
def test_a_compiled_model_gathers_what_it_needs(way):
    torch._dynamo.reset()
    plain, parted = pair(gpt)
    run = parted
    if way == "in place":
        parted.module.compile(backend="eager")
    else:
        run = torch.compile(parted if way == "engine" else parted.module, backend="eager")
    for seed in range(3):
        loss, other = gpt_loss(run, seed), gpt_loss(plain, seed)
        assert loss.item() == other.item()
        parted.backward(loss)
        plain.backward(other)
        parted.step()
        plain.step()
    assert released(parted)
    assert_same(plain, parted)


def test_an_optimizer_alone_cannot_partition():
    with pytest.raises(ConfigError, match=r"stage=3 is what an Engine does"):
        OffloadedAdamW(gpt().parameters(), stage=3)


# --- memory -------------------------------------------------------------------------------------------


def deep(layers):
    torch.manual_seed(0)
    with place():
        return nn.Sequential(nn.Linear(8, 32), *(nn.Linear(32, 32) for _ in range(layers)))


@pytest.mark.draws(1)
@everywhere
@pytest.mark.states_in_memory
def test_device_memory_does_not_grow_with_depth_and_is_as_planned():
    peaks = {}
    for layers in (12, 48):
        engine = wrap(deep(layers), **STAGE_3, prefetch_bucket_size=2200, max_live_parameters=4000)
        seen = []
        for module in engine.module:
            module.register_forward_hook(lambda *args: seen.append(held(engine.module)))  # noqa: B023
            module.weight.register_hook(lambda g: seen.append(held(engine.module)))  # noqa: B023
        for seed in range(3):
            engine.backward(engine(inputs(2, 8, seed=seed)).pow(2).mean())
            engine.step()
        peaks[layers] = max(seen)
        assert released(engine)
        report = engine.memory_report()
        assert report.device_bytes == 0
        assert report.host["parameters on the host"] >= 4 * report.numel
        assert report.host_bytes == report.planned_host_bytes
        plan = Planner(engine.optimizer.core._pipeline.buckets.terms).plan(engine.optimizer.core.params)
        [window] = [row for row in plan.rows if row.what == "gathered parameters"]
        assert 0.8 * 4 * 4000 < window.n_bytes <= 4 * 4000  # beside the most gradients
        assert peaks[layers] <= 4 * 4000
    assert abs(peaks[48] / peaks[12] - 1) < 0.05, peaks


@pytest.mark.long("several trainings of mixtures of experts")
@pytest.mark.draws(2)
@everywhere
@pytest.mark.parametrize("again", [None, "block", "expert"])
@pytest.mark.parametrize("leaves", [(), ("Experts",)])
def test_experts_without_tokens_change_no_bit(again, leaves):
    plain = wrap(mixture(again), lr=1e-2)
    parted = wrap(mixture(again), lr=1e-2, **NARROW, leaf_modules=leaves)
    for engine in (plain, parted):
        for step in range(6):
            engine.backward(engine(rows(step)).square().mean())
            engine.step()
    assert_same(plain, parted)
    assert released(parted)


@pytest.mark.draws(1)
@everywhere
def test_experts_are_gathered_when_tokens_are_routed_to_them():
    engine = wrap(mixture(), lr=1e-2, **{**STAGE_3, "max_reuse_distance": 0})
    gathered, routed = [], []
    for name, param in engine.module.named_parameters():
        record = engine.optimizer.sharding.parameters.record_of(param)
        if name.endswith("up.weight"):
            allocate = record.live.memory.allocate
            record.allocate = lambda name=name, allocate=allocate: gathered.append(name) or allocate()
    for step in range(20):
        if step == 10:
            gathered.clear()
            routed.clear()
        engine.backward(engine(rows(step)).square().mean())
        engine.step()
        # once for forward, once for backward
        routed += 2 * [f"{i}.experts.{number}.up.weight" for i in (1, 2) for number in engine.module[i].routed]
    wasted = collections.Counter(gathered) - collections.Counter(routed)
    assert not collections.Counter(routed) - collections.Counter(gathered)
    assert wasted.total() < 0.2 * len(routed), (wasted, len(routed))


@pytest.mark.parametrize("names", ["Experts", [1], [""], 3])
def test_leaf_modules_are_a_list_of_names(names):
    with pytest.raises(ConfigError, match="leaf_modules: got .*, expected a list of names of classes or of modules"):
        wrap(mixture(), **STAGE_3, leaf_modules=names)


@pytest.mark.draws(1)
@pytest.mark.parametrize("fields", [{"stage": 1}, {"stage": 2}, {"stage": 3}, STAGE_3])
def test_a_leaf_module_that_is_not_there_is_named_in_every_stage(fields):
    there = ["1", "experts.0", f"{Experts.__module__}.Experts"]
    wrap(mixture(), **fields, leaf_modules=there).close()
    with pytest.raises(ParameterError, match="leaf_modules: the model has no module 'Mixture'.*'Sequential'"):
        wrap(mixture(), **fields, leaf_modules=[*there, "Mixture"])


def test_an_optimizer_alone_has_no_leaf_modules():
    with pytest.raises(ConfigError, match=r"leaf_modules=\('Experts',\) is what an Engine does"):
        OffloadedAdamW(mixture().parameters(), leaf_modules=["Experts"])


class KeepsLossAside(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        self.temporary = (torch.tanh(x @ self.weight) @ self.weight.T).square().mean()
        return x


@everywhere
def test_a_leaf_module_s_parameters_are_there_for_a_loss_that_a_module_inside_keeps_aside():
    plain, parted = (
        wrap(nn.Sequential(nn.Sequential(KeepsLossAside())).to(place()), lr=0.1, **fields)
        for fields in ({}, {**STAGE_3, "leaf_modules": ["0"]})
    )
    for engine in (plain, parted):
        for step in range(2):
            engine(torch.ones(2, 8, device=place()) * step)
            engine.backward(engine.module[0][0].temporary)
            engine.step()
    assert_same(plain, parted)
