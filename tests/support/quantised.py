"""Layers with a frozen quantised base and an adapter: bitsandbytes', torchao's."""

import bitsandbytes as bnb
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

FOUR_BITS = {"quant_type": "nf4", "compute_dtype": torch.bfloat16, "compress_statistics": False}


def _of_bitsandbytes(kind, **fields):
    def of(linear):
        found = kind(linear.in_features, linear.out_features, bias=False, **fields)
        found.load_state_dict(linear.state_dict())
        found.support_avx512bf16_for_cpu = False  # else it packs its weight otherwise for inference on such a CPU
        return found.to("cpu")  # which quantises

    return of


def _of_torchao(linear):
    quantize_(linear, Int8WeightOnlyConfig())
    return linear.requires_grad_(False)


KINDS = {
    "nf4": _of_bitsandbytes(bnb.nn.Linear4bit, **FOUR_BITS),
    "nf4, scales quantised": _of_bitsandbytes(bnb.nn.Linear4bit, **FOUR_BITS | {"compress_statistics": True}),
    "nf4 as bfloat16": _of_bitsandbytes(bnb.nn.Linear4bit, **FOUR_BITS, quant_storage=torch.bfloat16),
    "int8": _of_bitsandbytes(bnb.nn.Linear8bitLt, has_fp16_weights=False, threshold=6.0),
    "torchao": _of_torchao,
    "bfloat16": lambda linear: linear.requires_grad_(False),
}


class Adapted(nn.Module):
    """A layer of 256 to 512 elements, frozen, and its adapter of rank 4."""

    def __init__(self, kind, n_in=256, n_out=512):
        super().__init__()
        self.base = KINDS[kind](nn.Linear(n_in, n_out, bias=False).to(torch.bfloat16))
        self.down, self.up = nn.Linear(n_in, 4, bias=False), nn.Linear(4, n_out, bias=False)

    def forward(self, x):
        return self.base(x.to(torch.bfloat16)).to(x.dtype) + self.up(self.down(x))


def model(kind):
    torch.manual_seed(0)
    return nn.Sequential(Adapted(kind), nn.ReLU(), Adapted(kind, 512, 256))


def loss_of(module, seed):
    return module(torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))).pow(2).mean()
