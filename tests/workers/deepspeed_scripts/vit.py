"""A vision transformer on small images, along the CIFAR tutorial: a loader that ``initialize`` makes, 16-bit inputs."""

import argparse
import json
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from frontends.torch import deepspeed
from frontends.torch.deepspeed.accelerator import get_accelerator


def add_argument():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("-e", "--epochs", default=3, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--log-interval", type=int, default=2)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3])
    parser.add_argument("--out", required=True)
    return deepspeed.add_config_arguments(parser).parse_args()


class ViT(nn.Module):
    def __init__(self, dim=32, patch=4, classes=4):
        super().__init__()
        self.to_patch_embedding = nn.Conv2d(3, dim, patch, patch)
        self.pos_embedding = nn.Parameter(torch.randn(1, 5, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, bias=False, batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, img):
        x = self.to_patch_embedding(img).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embedding
        return self.mlp_head(self.transformer(x)[:, 0])


def images(seed, n=48):
    """Images whose class is the quarter that is bright."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=generator)
    found = 0.3 * torch.randn(n, 3, 8, 8, generator=generator)
    for image, label in zip(found, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    return TensorDataset(found, labels)


def get_ds_config(args):
    return {
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.003, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.003, "warmup_num_steps": 6},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


def test(model_engine, testset, local_device, target_dtype):
    model_engine.eval()
    correct = total = 0
    with torch.no_grad():
        for images, labels in torch.utils.data.DataLoader(testset, batch_size=8):
            if target_dtype is not None:
                images = images.to(target_dtype)
            outputs = model_engine(images.to(local_device))
            correct += (outputs.argmax(1) == labels.to(local_device)).sum().item()
            total += labels.size(0)
    model_engine.train()
    return correct / total


def main():
    args = add_argument()
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(5)
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()  # rank 0 downloads
    trainset, testset = images(0), images(1)
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    net = ViT()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset, config=get_ds_config(args)
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half
    criterion = nn.CrossEntropyLoss()
    log, running_loss = [], 0.0
    for epoch in range(args.epochs):
        for i, data in enumerate(trainloader):
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            outputs = model_engine(inputs)
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            model_engine.step()
            running_loss += loss.item()
            if model_engine.local_rank == 0 and i % args.log_interval == (args.log_interval - 1):
                log.append({"epoch": epoch, "loss": running_loss / args.log_interval, "lr": model_engine.get_lr()})
                running_loss = 0.0
    log.append({"accuracy": test(model_engine, testset, local_device, target_dtype)})
    model_engine.save_checkpoint(args.out)
    weights = {}
    for name, param in model_engine.module.named_parameters():
        master = deepspeed.utils.safe_get_full_fp32_param(param)
        weights[name] = param.detach().cpu() if master is None else master  # stage 0 has none
    if torch.distributed.get_rank() == 0:
        torch.save(weights, os.path.join(args.out, "weights.pt"))
        with open(os.path.join(args.out, "log.json"), "w") as file:
            json.dump(log, file)


if __name__ == "__main__":
    main()
