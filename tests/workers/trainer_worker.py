"""One rank of Hugging Face's Trainer, run by tests/integrations/test_*trainer.py: SCENARIO RANK WORLD_SIZE FOLDER."""

import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM

from frontends.torch import gathered_parameters, wrap
from frontends.torch.integrations.transformers import OffloadCallback
from offload_core.errors import ConfigError
from tests.support.hugging_face import (
    ARGUMENTS,
    DATA,
    LR,
    STAGES,
    TORCHS,
    ExactNorm,
    Generated,
    llama,
    on_engine,
    states_of,
    trained,
    trainer_of,
)
from tests.support.torch_rank import bits, main

RANKS = {"per_device_train_batch_size": 1, "ddp_backend": "gloo"}


def shards(rank, world_size):
    """Against fused AdamW, which like ours finds the gradients that DistributedDataParallel has averaged."""
    folder = sys.argv[4]
    settings = {"learning_rate": LR, "max_steps": 5, "save_steps": 2, **RANKS}
    saving = {**settings, "save_only_model": True}
    theirs = trained(f"{folder}/theirs", TORCHS, **settings, save_strategy="no")
    ours = trained(f"{folder}/ours", ARGUMENTS, callbacks=[OffloadCallback()], **saving)
    dist.barrier()
    resumed = trained(
        f"{folder}/ours", ARGUMENTS, callbacks=[OffloadCallback()], resume=f"{folder}/ours/checkpoint-2", **saving
    )
    try:
        trained(f"{folder}/refused", ARGUMENTS, callbacks=[OffloadCallback()], **settings)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    unpartitioned = trainer_of(f"{folder}/whole", callbacks=[OffloadCallback()], **saving)
    try:  # each rank has all states, and would write the same files at the first save
        unpartitioned.train()
        whole = ""
    except ConfigError as error:
        whole = str(error)
    said = {"refused": refused, "whole": whole, "steps": unpartitioned.state.global_step}
    held = sum(state["exp_avg"].numel() for state in resumed.optimizer.state.values())
    numel = sum(p.numel() for p in resumed.model.parameters())
    runs = {"ours": ours, "theirs": theirs, "resumed": resumed}
    return {name: bits(run.model) for name, run in runs.items()} | {"share": held / numel} | said


class MeanOfRanks(ExactNorm):
    """Averages each micro-step's gradients over the ranks by hand, and sums them; nothing is around the model."""

    def create_optimizer(self, model=None):
        self.model._is_accelerate_prepared = True
        return super().create_optimizer(model)

    def training_step(self, *args, **kwargs):
        trained = [p for p in self.model.parameters() if p.requires_grad]
        before = [p.grad for p in trained]
        self.model.zero_grad()
        loss = super().training_step(*args, **kwargs)
        for p, earlier in zip(trained, before, strict=True):
            of_each = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(of_each, p.grad)
            mean = sum(of_each) / len(of_each)
            p.grad = mean if earlier is None else earlier + mean
        return loss


def told(trainer, generated=None):
    """The bits of the master weights, what was logged of losses, and what was generated."""
    masters = [nn.Parameter(states["master"]) for states in states_of(trainer).values()]
    losses = [[entry.get("loss"), entry.get("eval_loss")] for entry in trainer.state.log_history[:-1]]
    tokens = None if generated is None else generated.tokens
    return {"bits": bits(SimpleNamespace(parameters=lambda: masters)), "losses": losses, "tokens": tokens}


def engine(rank, world_size):
    """Each stage against torch's fused AdamW, accumulating four micro-steps and clipping; and resumed in another."""
    folder = sys.argv[4]
    settings = {"learning_rate": LR, "max_steps": 4, **RANKS, "gradient_accumulation_steps": 4, "eval_steps": 2}
    settings |= {"activation_checkpointing": True, "eval_strategy": "steps", "evaluated": DATA[:4], "save_steps": 2}
    generated = Generated()
    theirs = {**settings, "save_strategy": "no", "callbacks": [generated]}
    result = {"theirs": told(trained(f"{folder}/theirs", TORCHS, kind=MeanOfRanks, **theirs), generated)}
    for stage in STAGES:
        generated = Generated()
        trainer = on_engine(f"{folder}/{stage}", stage, callbacks=[generated], **settings)
        result[stage] = told(trainer, generated)
    trainer.save_model(f"{folder}/saved")
    dist.barrier()
    loaded = LlamaForCausalLM.from_pretrained(f"{folder}/saved")
    result["saved"] = bits(loaded)
    optimizer = trainer.engine.optimizer
    result["share"] = sum(s["exp_avg"].numel() for s in optimizer.state.values()) / loaded.num_parameters()
    generated = Generated()
    path = f"{folder}/3/checkpoint-2"
    result["resumed"] = told(on_engine(f"{folder}/resumed", "2", resume=path, callbacks=[generated], **settings))
    result["resumed"]["tokens"] = [*result["3"]["tokens"][:2], *generated.tokens]
    once = {**settings, "gradient_accumulation_steps": 1, "save_strategy": "no"}
    result["DDP"] = told(trained(f"{folder}/ddp", TORCHS, kind=ExactNorm, **once))
    result["one micro-step"] = told(on_engine(f"{folder}/once", "3", **once))
    return result


def sft(rank, world_size):
    """TRL's trainer in stages 2 and 3, resumed, and with an adapter."""
    from peft import LoraConfig

    from tests.support.sft import OffloadSFTTrainer, SFTTrainer, tuned

    class MeanOfRanksSFTTrainer(MeanOfRanks, SFTTrainer):
        pass

    folder = sys.argv[4]

    def of(name, kind, **fields):
        generated = Generated()
        trainer = tuned(f"{folder}/{name}", kind, generated=generated, settings={"ddp_backend": "gloo"}, **fields)
        return trainer, told(trainer, generated)

    result, adapter = {}, {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])}
    _, result["theirs"] = of("theirs", MeanOfRanksSFTTrainer)
    _, result["adapter, theirs"] = of("adapter", MeanOfRanksSFTTrainer, **adapter)
    _, result["2"] = of("2", OffloadSFTTrainer, offload=STAGES["2"])
    trainer, result["3"] = of("3", OffloadSFTTrainer, offload=STAGES["3"])
    trainer.save_model(f"{folder}/saved")
    dist.barrier()
    result["saved"] = bits(LlamaForCausalLM.from_pretrained(f"{folder}/saved"))
    path = f"{folder}/3/checkpoint-2"
    _, result["resumed"] = of("resumed", OffloadSFTTrainer, offload=STAGES["3"], resume=path)
    result["resumed"]["tokens"] = result["3"]["tokens"][:2] + result["resumed"]["tokens"]
    _, result["adapter, 3"] = of("parts", OffloadSFTTrainer, offload=STAGES["3"], **adapter)
    return result


def adapters(rank, world_size):
    """An adapter in stage 3, saved, and merged layer by layer, against both ranks' batches with torch."""
    from peft import PeftModel

    from tests.support.adapters import adapted, each_layer, on_engine, with_torch

    expected, folder = adapted(), sys.argv[4]
    with_torch(expected, range(3), ranks=world_size)
    result = {"theirs": bits(expected)}
    model = wrap(adapted(), lr=LR, **STAGES["3"])
    on_engine(model, range(3), rank, world_size)
    trained = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
    with gathered_parameters(trained.values()):
        model.module.save_pretrained(f"{folder}/adapter", state_dict=trained, is_main_process=rank == 0)
    dist.barrier()
    result["saved"] = bits(PeftModel.from_pretrained(llama(), f"{folder}/adapter"))
    each_layer(model.module, lambda layer: layer.merge())
    merged = model.module.unload()
    with gathered_parameters(merged.parameters()):
        result["merged"] = bits(merged)
    return result | {"theirs, merged": bits(expected.merge_and_unload())}


if __name__ == "__main__":
    launched = {"RANK": sys.argv[2], "LOCAL_RANK": sys.argv[2], "WORLD_SIZE": sys.argv[3]}
    os.environ |= launched | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "HF_HUB_OFFLINE": "1"}
    main(globals(), timeout=60)
