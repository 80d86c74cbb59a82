"""The most bytes of Trainer on the simulated accelerator, for test_offload_trainer.py: KIND RANK WORLD_SIZE FOLDER."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from frontends.torch.integrations.transformers import offloaded_adamw
from tests.support import simulated
from tests.support.hugging_face import DATA, STAGES, TORCHS, on_engine, states_of, trained

SETTINGS = {
    "use_cpu": False, "max_steps": 2, "save_strategy": "no", "gradient_accumulation_steps": 1, "warmup_steps": 0,
    "per_device_train_batch_size": 1, "eval_strategy": "epoch", "evaluated": DATA[:2], "learning_rate": 1e-2,
    "max_grad_norm": 0.0,
}  # fmt: skip
BUCKETS = {"reduce_bucket_size": 70_000}
LIVE = {"max_live_parameters": 600_000, "prefetch_bucket_size": 200_000}
"""Of 2.1 million, so that stage 3 has something to leave out."""


def large():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
    config = LlamaConfig(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **sizes)
    config._attn_implementation = "eager"  # the device has no other
    return LlamaForCausalLM(config)


def alone(args):
    return {"optimizer_cls_and_kwargs": offloaded_adamw(args, **BUCKETS)}


def main():
    kind, folder = sys.argv[1], Path(sys.argv[4])
    torch.set_num_threads(1)
    simulated.prepare()
    with simulated.available():
        os.environ |= {"ACCELERATE_TORCH_DEVICE": f"{simulated.NAME}:0", "HF_HUB_OFFLINE": "1"}
        model = large()
        if kind in STAGES:
            fields = STAGES[kind] | BUCKETS | (LIVE if kind == "3" else {})
            trainer = on_engine(folder, fields, model=model, **SETTINGS)
        else:
            trainer = trained(folder, TORCHS if kind == "torch" else alone, model=model, **SETTINGS)
        torch.accelerator.synchronize()
        held = torch.accelerator.max_memory_allocated()
        assert trainer.args.device.type == simulated.NAME
        digest = hashlib.sha256()
        for states in states_of(trainer).values():
            digest.update(states["master"].cpu().numpy().tobytes())
        losses = [[entry.get("loss"), entry.get("eval_loss")] for entry in trainer.state.log_history[:-1]]
        n_params = sum(p.numel() for p in model.parameters())
        result = {"bytes a parameter": held / n_params, "bits": digest.hexdigest(), "losses": losses}
        (folder / "0.json").write_text(json.dumps(result))
        os._exit(0)


if __name__ == "__main__":
    main()
