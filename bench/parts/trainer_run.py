"""One run of ``bench.parts.trainer``: CONTENDER SETTINGS, in a folder with ``model`` and ds_config-STAGE.json.

Hugging Face's Trainer as its documentation has it: arguments, a model ``from_pretrained``, ``train()``.
"""

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from bench.peers import find_compilers, free_port

TORCH, ALONE = "Trainer, adamw_torch_fused", "Trainer, the optimizer alone"
OURS, OURS_3 = "OffloadTrainer, stage 2", "OffloadTrainer, stage 3"
DS_2, DS_3 = "Trainer with DeepSpeed, stage 2", "Trainer with DeepSpeed, stage 3"
CONFIGS = {OURS: "ds_config-2.json", DS_2: "ds_config-2.json", OURS_3: "ds_config-3.json", DS_3: "ds_config-3.json"}
MODEL, RESULT = "model", "result.json"
CPU, SIMULATED = "cpu", "simulated"
_VOCABULARY, _TOKENS, _ROWS = 64, 12, 64


class Run(NamedTuple):
    """The results of a run."""

    losses: list[float]
    norms: list[float]
    bytes: tuple[float, float] | None
    """The peak on the device in bytes a parameter: in the complete run, and from the second update on. None: it is the
    CPU."""
    versions: dict[str, str]


def main() -> None:
    contender, settings = sys.argv[1], json.loads(sys.argv[2])
    deepspeed = contender in (DS_2, DS_3)
    if deepspeed:  # it makes a group of one rank
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        find_compilers()
    torch.set_num_threads(1)
    on_device = settings["device"] == SIMULATED
    if on_device:
        from tests.support import simulated

        simulated.load()
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"{simulated.NAME}:0"
        if deepspeed:
            from bench.parts import deepspeed_device

            deepspeed_device.install()
    trainer = trainer_of(contender, settings["arguments"], on_device)
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    n_bytes = None
    if on_device:
        torch.accelerator.synchronize()
        numel = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters())
        later = torch.accelerator.max_memory_allocated()
        n_bytes = max(watch.before, later) / numel, later / numel
    known = ("torch", "transformers", "accelerate", *(("deepspeed",) if deepspeed else ()))
    run = Run(
        [entry["loss"] for entry in log],
        [float(entry["grad_norm"]) for entry in log],
        n_bytes,
        {name: metadata.version(name) for name in known},
    )
    Path(RESULT).write_text(json.dumps(run._asdict()))
    os._exit(0)  # neither the group nor the device is taken down


class Watch(TrainerCallback):
    """Notes the most bytes on the device until the first update has ended, and forgets them."""

    before = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and args.device.type == SIMULATED:
            torch.accelerator.synchronize()
            self.before = torch.accelerator.max_memory_allocated()
            torch.accelerator.reset_peak_memory_stats()


def trainer_of(contender: str, settings: dict[str, Any], on_device: bool) -> Any:
    rows = torch.randint(_VOCABULARY, (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(1))
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    deepspeed = contender in (DS_2, DS_3)
    place: dict[str, Any] = {} if on_device or deepspeed else {"use_cpu": True}
    if deepspeed:
        place["deepspeed"] = CONFIGS[contender]
    args = TrainingArguments("runs", **place, **settings)
    model = LlamaForCausalLM.from_pretrained(MODEL, attn_implementation="eager")  # the simulated device has no other
    if contender in (OURS, OURS_3):
        from frontends.torch.integrations.trainer import OffloadTrainer

        return OffloadTrainer(model, args, train_dataset=data, offload=CONFIGS[contender])
    if contender == ALONE:
        from frontends.torch.integrations.transformers import offloaded_adamw

        buckets = {"reduce_bucket_size": model.config.hidden_size**2}  # as "auto" is for the others
        return Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=offloaded_adamw(args, **buckets))
    if contender == DS_2 and on_device:
        model.to(args.device)  # parameters that move here are new ones, as they are not with CUDA; DeepSpeed names them
    return Trainer(model, args, train_dataset=data)


def save_model(folder: Path) -> int:
    """Write the model that all runs start from; return the number of its parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
    config = LlamaConfig(vocab_size=_VOCABULARY, num_attention_heads=2, num_key_value_heads=2, **sizes)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / MODEL)
    return int(model.num_parameters())


if __name__ == "__main__":
    main()
