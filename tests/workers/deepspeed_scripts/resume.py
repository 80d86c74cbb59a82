"""A loop that resumes: it begins with ``load_checkpoint``, saves every few steps, and may be killed at any time."""

import argparse
import json
import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from frontends.torch import deepspeed
from frontends.torch.deepspeed import comm as dist
from frontends.torch.deepspeed.utils import RepeatingLoader, log_dist, logger


def get_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint_dir", required=True)
    parser.add_argument("--metrics", required=True, help="lines of JSON, to which each run adds its own")
    parser.add_argument("--num_iterations", type=int, default=10)
    parser.add_argument("--checkpoint_every", type=int, default=3)
    parser.add_argument("--killed_at", type=int, default=-1, help="the last rank ends itself before this step")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
    parser.add_argument("--stage", type=int, default=2)
    return parser.parse_args()


def get_config(args):
    return {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 20, "warmup_max_lr": 1e-2, "warmup_num_steps": 3},
        },
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
    }


def get_dataloader(batch_size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 12, generator=generator)
    y = x @ torch.randn(12, 3, generator=generator)
    dataset = TensorDataset(x, y)
    return DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset, shuffle=False))


def main():
    args = get_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(21)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3))
    engine, _, _, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), config=get_config(args)
    )
    log_dist(f"{sum(p.numel() for p in model.parameters())} parameters", ranks=[0])
    start, seen = 0, 0
    path, client_state = engine.load_checkpoint(args.checkpoint_dir)
    if path is not None:
        start, seen = client_state["step"] + 1, client_state["samples"]
        logger.info("resumed from %s", path)
    batches = RepeatingLoader(get_dataloader(engine.train_micro_batch_size_per_gpu()))
    for _ in range(start * engine.gradient_accumulation_steps()):
        next(batches)  # those that were used
    if path is not None:
        torch.set_rng_state(client_state["rng"])  # loaders draw, too
    for step in range(start, args.num_iterations):
        if step == args.killed_at and engine.global_rank == engine.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total = 0.0
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = (value.to(engine.device) for value in next(batches))
            noise = torch.randn(x.shape)  # from the generator that goes on
            loss = nn.functional.mse_loss(engine(x + 0.01 * noise), y)
            engine.backward(loss)
            engine.step()
            total += loss.item()
        seen += engine.train_batch_size()
        if engine.global_rank == 0:
            line = {"step": step, "loss": total, "lr": scheduler.get_last_lr(), "steps": engine.global_steps}
            with open(args.metrics, "a") as file:
                print(json.dumps({**line, "samples": [seen, engine.global_samples]}), file=file)
        if (step + 1) % args.checkpoint_every == 0:
            state = {"step": step, "samples": seen, "rng": torch.get_rng_state()}
            engine.save_checkpoint(args.checkpoint_dir, client_state=state)
    engine.save_checkpoint(args.checkpoint_dir, tag="last", save_latest=False)
    weights = {n: deepspeed.utils.safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(weights, os.path.join(args.checkpoint_dir, "weights.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
