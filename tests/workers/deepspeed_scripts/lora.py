"""LoRA adapters of a language model in stage 3, with transformers and PEFT: only the adapters are trained and saved."""

import argparse
import json
import os

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from frontends.torch import deepspeed
from frontends.torch.deepspeed import zero
from frontends.torch.deepspeed.ops.adam import DeepSpeedCPUAdam
from frontends.torch.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--zero_stage", type=int, default=3)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--lora_r", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--max_steps", type=int, default=8)
    parser.add_argument("--torch_adam", action="store_true")
    return parser.parse_args()


def get_train_ds_config(args):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": args.zero_stage,
            "offload_param": {"device": "cpu" if args.zero_stage == 3 else "none"},
            "offload_optimizer": {"device": "cpu"},
            "stage3_param_persistence_threshold": 100,
            "stage3_max_live_parameters": 30000000,
            "stage3_prefetch_bucket_size": 30000000,
        },
        "bf16": {"enabled": False},
    }


def create_model(args, ds_config):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    torch.manual_seed(11)
    pretrained = LlamaForCausalLM(config).state_dict()  # other scripts read it from files
    with zero.Init(config_dict_or_path=ds_config, enabled=args.zero_stage == 3):
        model = LlamaForCausalLM(config)
    for name, param in model.named_parameters():
        with zero.GatheredParameters([param], modifier_rank=0, enabled=args.zero_stage == 3):
            if deepspeed.comm.get_rank() == 0:
                param.data.copy_(pretrained[name])
    torch.manual_seed(12)
    lora = LoraConfig(r=args.lora_r, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def count_parameters(model):
    return sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in model.parameters())


def maybe_zero_3(param):
    """As scripts of chat models have it: parameters in shards are gathered, others are whole."""
    if hasattr(param, "ds_id"):
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE or param.ds_numel <= 100, param.ds_status
        with zero.GatheredParameters([param]):
            return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


def get_peft_state_maybe_zero_3(named_params):
    return {name: maybe_zero_3(param) for name, param in named_params if "lora_" in name}


def batches(args, rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2 * args.max_steps):
        start = torch.randint(32, (4, 1), generator=generator)
        ids = (start + torch.arange(12)) % 32
        yield {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def main():
    args = parse_args()
    deepspeed.init_distributed()
    ds_config = get_train_ds_config(args)
    model = create_model(args, ds_config)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if args.torch_adam:
        optimizer = torch.optim.AdamW(trainable, lr=args.learning_rate, betas=(0.9, 0.95))
    else:
        optimizer = DeepSpeedCPUAdam(trainable, lr=args.learning_rate, betas=(0.9, 0.95))
    model_engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=ds_config, args=args, dist_init_required=True
    )
    log = [{"parameters": count_parameters(model)}]
    for batch in batches(args, model_engine.global_rank):
        batch = {name: value.to(model_engine.device) for name, value in batch.items()}
        loss = model_engine(**batch).loss
        model_engine.backward(loss)
        model_engine.step()
        if model_engine.is_gradient_accumulation_boundary():
            log.append({"step": model_engine.global_steps, "loss": loss.item()})
    adapters = get_peft_state_maybe_zero_3(model_engine.module.named_parameters())
    deepspeed.utils.logger.info("saving the adapters")
    if deepspeed.comm.get_rank() == 0:
        os.makedirs(args.output_dir, exist_ok=True)
        model_engine.module.peft_config["default"].save_pretrained(args.output_dir)
        torch.save(adapters, os.path.join(args.output_dir, "adapter_model.bin"))
        with open(os.path.join(args.output_dir, "log.json"), "w") as file:
            json.dump(log, file)
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
