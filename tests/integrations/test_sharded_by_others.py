"""Models that Accelerate, Trainer or transformers shard with FSDP2: the optimizer is replaced in one line.

It gives the bits of ``torch.optim.AdamW(fused=True)``. The start of processes takes longest, so each test makes all its
runs in one group of them.
"""

import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

from frontends.torch import OffloadedAdamW
from frontends.torch.integrations.transformers import OffloadCallback, offloaded_adamw
from tests.support import fsdp_on_cpu
from tests.support.hugging_face import CLIP, DATA, LR, llama
from tests.support.processes import on_ranks
from tests.support.torch_rank import local_bits

STEPS, SAVED = 6, 3
FUSED = (torch.optim.AdamW, {"lr": LR, "fused": True})
OURS = (OffloadedAdamW, {"lr": LR})
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's checkpoints and FSDP2, which are not ours


def quiet(body):
    """In a process of its own, where pytest's marks do not count."""
    warnings.simplefilter("ignore")
    fsdp_on_cpu.allow()
    return body()


def by_accelerate(folder, optimizer, *, early=False, resumed=False, kind="SHARDED_STATE_DICT"):
    """Losses, bits and the optimizer of a run whose model Accelerate shards; it saves in the middle, or goes on there.

    Args:
        early: True makes the optimizer before anybody can know of FSDP2.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    model = llama()
    made = optimizer[0](model.parameters(), **optimizer[1]) if early else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp_on_cpu.plugin(kind))
    made = made or optimizer[0](model.parameters(), **optimizer[1])
    held = [slot.param.shape for slot in getattr(made, "slots", ())]
    model, made = accelerator.prepare(model, made)
    if resumed:
        accelerator.load_state(folder)
    losses = []
    for step in range(SAVED if resumed else 0, STEPS):
        torch.manual_seed(step)  # of dropout
        rows = torch.stack([DATA[(2 * step + accelerator.process_index) % len(DATA)]["input_ids"]])
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        made.step()
        made.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVED and not resumed:
            accelerator.save_state(folder)
    return losses[-(STEPS - SAVED) :], local_bits(model, made), held, made.optimizer


@pytest.mark.slow
def test_an_optimizer_that_accelerate_shards_has_states_of_the_shards_and_the_bits_of_fused_adamw(tmp_path):
    @on_ranks(2)
    def found(rank):
        def run():
            theirs = by_accelerate(tmp_path / "theirs", FUSED)
            ours = by_accelerate(tmp_path / "ours", OURS)
            again = by_accelerate(tmp_path / "ours", OURS, resumed=True)
            whole = by_accelerate(tmp_path / "whole", OURS, early=True, kind="FULL_STATE_DICT")
            from_whole = by_accelerate(tmp_path / "whole", OURS, resumed=True, kind="FULL_STATE_DICT")
            from_torchs = by_accelerate(tmp_path / "theirs", OURS, resumed=True)
            numbers = [
                sum(p.to_local().numel() for group in run[3].param_groups for p in group["params"])
                for run in (ours, whole)
            ]
            states = [sum(slot.values.numel() for slot in run[3].slots) for run in (ours, whole)]
            runs = [run[:2] for run in (theirs, ours, again, whole, from_whole, from_torchs)]
            return runs, [ours[2], len(whole[2])], numbers == states

        return quiet(run)

    for runs, held, of_shards in found:
        assert all(run == runs[0] for run in runs), runs
        assert held == [[], sum(1 for _ in llama().parameters())]  # made of whole parameters only where nobody knew
        assert of_shards


def by_trainer(folder, arguments, *, model=None, callbacks=(), resume=None, **settings):
    AcceleratorState._reset_state(reset_partial_state=True)
    settings = {
        "fsdp": True,
        "fsdp_config": {
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        "save_steps": SAVED,
        **settings,
    }
    args = TrainingArguments(
        str(folder), learning_rate=LR, max_steps=STEPS, per_device_train_batch_size=1, max_grad_norm=CLIP,
        weight_decay=0.1, warmup_steps=2, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False, ddp_backend="gloo", **settings,
    )  # fmt: skip
    made = arguments(args) if callable(arguments) else arguments
    assert made[1].get("process_group") is None  # the parameters' placements say which process has which states
    trainer = Trainer(model or llama(), args, train_dataset=DATA, optimizer_cls_and_kwargs=made, callbacks=[*callbacks])
    trainer.train(resume_from_checkpoint=resume)
    log = trainer.state.log_history
    losses = [entry["loss"] for entry in log if "loss" in entry]
    return losses, local_bits(trainer.model, trainer.optimizer), [e for e in log if "offload_host_bytes" in e]


@pytest.mark.slow
def test_trainers_fsdp_trains_and_resumes_with_the_bits_of_fused_adamw(tmp_path):
    @on_ranks(2)
    def found(rank):
        def run():
            theirs = by_trainer(tmp_path / "theirs", FUSED)
            ours = by_trainer(tmp_path / "ours", OURS)
            by_args = by_trainer(tmp_path / "args", offloaded_adamw, callbacks=[OffloadCallback()])
            resume = str(tmp_path / "args" / f"checkpoint-{SAVED}")
            again = by_trainer(tmp_path / "args", offloaded_adamw, callbacks=[OffloadCallback()], resume=resume)
            assert not (tmp_path / "args" / f"checkpoint-{SAVED}" / "offload").exists()
            return [run[:2] for run in (theirs, ours, by_args, again)], len(by_args[2])

        return quiet(run)

    for runs, n_logged in found:
        assert all(run == runs[0] for run in runs), runs
        assert n_logged == STEPS


@pytest.mark.slow
def test_a_model_that_transformers_shards_over_two_dimensions_trains_with_the_bits_of_fused_adamw(tmp_path):
    """``from_pretrained`` has its parameters as DTensors; Trainer saves no states of such models."""
    llama().save_pretrained(tmp_path / "model")

    @on_ranks(4)
    def found(rank):
        def run():
            def model():
                plan = DistributedConfig(tp_size=2, fsdp_size=2)
                return LlamaForCausalLM.from_pretrained(tmp_path / "model", distributed_config=plan)

            plain = {"fsdp": None, "fsdp_config": None, "save_strategy": "no"}
            placed = lambda args: offloaded_adamw(args, process_group=None)  # noqa: E731
            torchs, ours = (by_trainer(tmp_path, how, model=model(), **plain)[:2] for how in (FUSED, placed))
            dims = {p.device_mesh.ndim for p in model().parameters() if hasattr(p, "device_mesh")}
            return torchs, ours, dims

        return quiet(run)

    for torchs, ours, dims in found:
        assert torchs == ours
        assert 2 in dims
