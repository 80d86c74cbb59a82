"""Activations that wait on the host, and checkpointing, in all stages: the same bits, and no gathered parameter is
copied."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from frontends.torch import wrap
from offload_core.errors import StateError
from tests.support.partitioned_models import llama, llama_loss
from tests.support.torch_models import assert_all_same, everything, place

STREAMED = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 33, "max_reuse_distance": 0}


def keep_products(context, op, *args, **kwargs):
    kept = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


AGAIN = {
    "nothing again": lambda block, x: block(x),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep_products)
    ),
}


class Blocks(nn.Module):
    def __init__(self, again, inside=None):
        super().__init__()
        torch.manual_seed(0)
        with place():
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
            )
        self.again, self.inside = AGAIN[again], inside

    def forward(self, x):
        for block in self.blocks:
            if self.inside is None:
                x = x + self.again(block, x)
            else:
                with self.inside():
                    x = x + self.again(block, x)
        return x


class Copied(save_on_cpu):
    """``save_on_cpu`` that notes the shapes and elements of what it copies."""

    def __init__(self, seen):
        super().__init__()
        pack = self.pack_hook

        def noted(tensor):
            seen.append((tuple(tensor.shape), tensor.numel()))
            return pack(tensor)

        self.pack_hook = noted


def rows(seed):
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)).to(place()).requires_grad_()


def trained(engine, around):
    for seed in range(3):
        with around():
            loss = engine(rows(seed)).pow(2).mean()
        engine.backward(loss)
        engine.step()
    return everything(engine)


class Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


@pytest.mark.draws(2)
@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("where", ["around", "inside"])
def test_activations_on_the_host_change_no_bit_and_take_no_weight_along(again, where, device):
    found, seen = [trained(wrap(Blocks(again), lr=1e-2), Nothing)], []
    copies = partial(Copied, seen)
    for fields in ({"stage": 2}, STREAMED):
        seen.clear()
        model = Blocks(again, copies if where == "inside" else None)
        found.append(trained(wrap(model, lr=1e-2, **fields), copies if where == "around" else Nothing))
        weights = [numel for shape, numel in seen if shape in ((32, 64), (64, 32))]
        if fields is STREAMED:
            assert not weights
        elif again == "nothing again":
            assert len(weights) == 3 * 3 * 2  # three steps, three blocks, two weights each
    assert seen or again != "nothing again"
    for other in found[1:]:
        assert_all_same(found[0], other)


def test_saved_activations_keep_no_gathered_parameter(device):
    engine = wrap(Blocks("nothing again"), lr=1e-2, **STREAMED)
    live = engine.optimizer.sharding.live
    with save_on_cpu():
        loss = engine(rows(0)).pow(2).mean()
    assert live.n_bytes == 0
    storages = [r.whole.untyped_storage().nbytes() for r in engine.optimizer.sharding.parameters.records.values()]
    assert not any(storages)
    engine.backward(loss)
    assert live.n_bytes == 0


def test_an_error_in_a_forward_leaves_no_hooks_behind(device):
    engine = wrap(Blocks("nothing again"), lr=1e-2, **STREAMED)
    with save_on_cpu():
        before = torch._C._autograd._top_saved_tensors_default_hooks(False)
        with pytest.raises(RuntimeError):
            engine(torch.ones(4, 31, device=place()))
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) == before
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_backward_after_an_update_of_what_its_forward_used_is_an_error(device):
    engine = wrap(Blocks("nothing again"), lr=1e-2, **STREAMED)
    with save_on_cpu():
        early = engine(rows(0)).pow(2).mean()
    engine.backward(engine(rows(1)).pow(2).mean())
    engine.step()
    with pytest.raises(
        StateError, match=r"was changed in place after its forward.*expected backward\(\) before step\(\)"
    ):
        engine.backward(early)


@pytest.mark.draws(1)
@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [True, False])
def test_transformers_own_checkpointing_beside_activations_on_the_host(reentrant, device):
    pytest.importorskip("transformers")
    found = []
    for fields, around in (({}, Nothing), (STREAMED, save_on_cpu)):
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        engine = wrap(model, lr=1e-2, **fields).train()
        for seed in range(2):
            with around():
                loss = llama_loss(engine, seed)
            engine.backward(loss)
            engine.step()
        found.append(everything(engine))
    assert_all_same(*found)
