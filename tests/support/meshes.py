"""Small models over meshes of four ranks: how each is sharded, its batches, and the whole tensors behind its shards."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

WORLD = 4
VOCABULARY, WIDTH, HEADS, LENGTH, N_EXPERTS = 64, 64, 4, 8, 8
"""Chosen so that each rank's part of each parameter has a multiple of 16 elements, whatever shards it."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of (batch, length, width). A rank of a tensor-parallel mesh has some of the heads."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class Experts(nn.Module):
    """Each projection is one tensor of all experts, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(N_EXPERTS, 2 * WIDTH, WIDTH) / 8)
        self.down_proj = nn.Parameter(torch.randn(N_EXPERTS, WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Rows, the experts of each, and their shares in its result."""
        return mixed(self.gate_up_proj, self.down_proj, 0, x, chosen, shares)


def mixed(
    ups: torch.Tensor, downs: torch.Tensor, first: int, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """The sum of what these experts, numbered from ``first`` on, make of the rows that chose them.

    All of them compute something, if only of no rows: else ranks would reduce other gradients.
    """
    out = torch.zeros_like(x)
    for i, (up_of_one, down) in enumerate(zip(ups, downs, strict=True)):
        row, place = torch.where(chosen == first + i)
        gate, up = F.linear(x[row], up_of_one).chunk(2, dim=-1)
        made = F.linear(F.silu(gate) * up, down) * shares[row, place, None]
        out = out.index_add(0, row, made.to(out.dtype))
    return out


class Mixture(nn.Module):
    """Two of the experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, N_EXPERTS, bias=False), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        shares, chosen = self.gate(rows).float().softmax(-1).topk(2, dim=-1)
        return self.experts(rows, chosen, shares / shares.sum(-1, keepdim=True)).view_as(x)


class Block(nn.Module):
    def __init__(self, feed: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn, self.mlp = Attention(), feed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    """Two blocks behind an embedding; its loss is that of the next token."""

    def __init__(self, feed: Callable[[], nn.Module] = Feed) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(feed()) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Uneven(nn.Module):
    """Matrices of 5, 3, 1 and 7 rows: on four ranks some have two, one or no rows. Each row has 64 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, n, bias=False) for n in (5, 3, 1, 7))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY + 1, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            y = layer(x)
            x = x + F.pad(torch.tanh(y), (0, WIDTH - y.shape[-1]))
        return self.lm_head(x)


def _of_transformers(name: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM  # slow to import

    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
             "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 32}  # fmt: skip
    if name == "mixtral":
        sizes |= {"num_local_experts": N_EXPERTS, "num_experts_per_tok": 2}
        return MixtralForCausalLM(MixtralConfig(**sizes))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def _tied() -> nn.Module:
    model = GPT()
    model.lm_head.weight = model.embed_tokens.weight
    return model


def _frozen() -> nn.Module:
    """Only feed-forward layers and norms are trained."""
    model = GPT()
    for name, param in model.named_parameters():
        param.requires_grad_("self_attn" not in name and "embed" not in name)
    return model


def _computed_again() -> nn.Module:
    model = GPT()
    for block in model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "gpt of experts": partial(GPT, Mixture),
    "llama": partial(_of_transformers, "llama"),
    "mixtral": partial(_of_transformers, "mixtral"),
    "uneven": Uneven,
    "tied": _tied,
    "frozen": _frozen,
    "computed again": _computed_again,
}


@dataclass(frozen=True)
class Sharded:
    """The way in which a model lies on the ranks.

    Args:
        mesh: a key of :data:`MESHES`.
        reshard: ``reshard_after_forward`` of ``fully_shard``.
        narrow: the element type in which gradients are reduced, under ``param_dtype`` bfloat16; None: all in fp32.
        columns: True has ``fully_shard`` cut matrices by columns, where their number allows it.
        dtype: of the parameters.
    """

    model: str = "gpt"
    mesh: str = "fsdp"
    reshard: bool = True
    narrow: torch.dtype | None = None
    columns: bool = False
    dtype: torch.dtype = torch.float32

    def make(self, device: str = "cpu", seed: int = 0) -> nn.Module:
        """The model with the values of this seed, sharded. All ranks must call this.

        It has ``loss(seed)``, that of this rank's batch, beside what the model has.
        """
        torch.manual_seed(seed)
        model = MODELS[self.model]().to(self.dtype)
        if device != "cpu":
            model = model.to(device)
        where, n_data = MESHES[self.mesh](model, self, device)
        model.loss = partial(loss_of, model, where, n_data, device)
        return model

    def __str__(self) -> str:
        parts = [self.model, self.mesh] + ["kept"] * (not self.reshard) + ["columns"] * self.columns
        parts += [str(t).removeprefix("torch.") for t in (self.narrow,) if t is not None]
        parts += [str(self.dtype).removeprefix("torch.")] * (self.dtype is not torch.float32)
        return ", ".join(parts)


def loss_of(model: nn.Module, where: int, n_data: int, device: str, seed: int) -> torch.Tensor:
    """The mean loss of the next token, of two rows that belong to this place among those with other data."""
    generator = torch.Generator().manual_seed(n_data * seed + where)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator).to(device)
    found = model(tokens)
    logits = getattr(found, "logits", found)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).flatten())


# --- meshes ------------------------------------------------------------------------------------------


def _fully_shard(model: nn.Module, mesh: DeviceMesh, how: Sharded, apart: DeviceMesh | None = None) -> None:
    """Shard each block, and the rest; ``apart``: the mesh of the experts in it."""
    options: dict[str, Any] = {"reshard_after_forward": how.reshard}
    if how.narrow is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=how.narrow)
    if how.columns:
        options["shard_placement_fn"] = lambda param: Shard(param.ndim - 1)
    for block in blocks_of(model):
        if apart is not None:
            fully_shard(block.mlp.experts, mesh=apart, **options)
            block.mlp.experts.set_gradient_divide_factor(WORLD)  # of their tokens, which are those of all ranks
            block.mlp.experts.set_force_sum_reduction_for_comms(True)  # gloo has no other
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def blocks_of(model: nn.Module) -> Any:
    return (model.model if hasattr(model, "model") else model).layers


def _fsdp(model: nn.Module, how: Sharded, device: str) -> tuple[int, int]:
    _fully_shard(model, init_device_mesh(device, (WORLD,), mesh_dim_names=("fsdp",)), how)
    return dist.get_rank(), WORLD


def _hsdp(model: nn.Module, how: Sharded, device: str) -> tuple[int, int]:
    _fully_shard(model, init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard")), how)
    return dist.get_rank(), WORLD


def _tp(model: nn.Module, how: Sharded, device: str) -> tuple[int, int]:
    _parallelize(model, init_device_mesh(device, (WORLD,), mesh_dim_names=("tp",)))
    return 0, 1


def _fsdp_tp(model: nn.Module, how: Sharded, device: str) -> tuple[int, int]:
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("fsdp", "tp"))
    _parallelize(model, mesh["tp"])
    _fully_shard(model, mesh["fsdp"], how)
    return mesh["fsdp"].get_local_rank(), 2


def _experts(model: nn.Module, how: Sharded, device: str) -> tuple[int, int]:
    """Experts over "ep", each part of them over "efsdp"; the rest over all ranks, as torchtitan has them."""
    world = init_device_mesh(device, (WORLD,), mesh_dim_names=("world",))
    dense, sparse = world._unflatten(0, (WORLD,), ("fsdp",)), world._unflatten(0, (2, 2), ("efsdp", "ep"))
    for block in blocks_of(model):
        _spread(block.mlp.experts, sparse["ep"])
    _fully_shard(model, dense["fsdp"], how, sparse["efsdp"])
    return dist.get_rank(), WORLD


MESHES: dict[str, Callable[[nn.Module, Sharded, str], tuple[int, int]]] = {
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "tp": _tp,
    "fsdp x tp": _fsdp_tp,
    "experts": _experts,
}
"""Functions that shard a model, and return this rank's place among those with other data, and the number of these."""


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism: with sequence parallelism in the models of this file, else between replicated activations.

    Norms and the embedding of a model of transformers stay plain parameters. So do experts.
    """
    inside = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    if not isinstance(model, GPT):
        inside |= {"self_attn.o_proj": RowwiseParallel()}
        inside |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        inside |= {"mlp.down_proj": RowwiseParallel()}
        outside: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    else:
        gathers = partial(PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        inside |= {"self_attn": gathers(), "mlp": gathers(), "mlp.up_proj": ColwiseParallel()}
        inside |= {f"{name}_layernorm": SequenceParallel() for name in ("input", "post_attention")}
        inside |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("self_attn.o_proj", "mlp.down_proj")}
        outside = {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    for block in blocks_of(model):
        there = {name for name, _ in block.named_modules()}
        parallelize_module(block, mesh, {name: style for name, style in inside.items() if name in there})
    parallelize_module(model, mesh, outside)


def _spread(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of the mesh some of the experts. They are given the rows of all, and their outputs are summed."""
    for name, param in [*experts.named_parameters()]:
        spread = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(spread))
    first = N_EXPERTS // mesh.size() * mesh.get_local_rank()

    def forward(x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        weights = (experts.gate_up_proj, experts.down_proj)
        ups, downs = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        x, chosen, shares = (_Gathered.apply(each, mesh) for each in (x, chosen, shares))
        return _Summed.apply(mixed(ups, downs, first, x, chosen, shares), mesh)

    experts.forward = forward


class _Gathered(torch.autograd.Function):
    """The rows of all ranks of a mesh, one after another; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        of_each = [torch.empty_like(rows) for _ in range(mesh.size())]
        dist.all_gather(of_each, rows.contiguous(), group=mesh.get_group())
        return torch.cat(of_each)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Summed.forward(ctx, grad, ctx.mesh), None


class _Summed(torch.autograd.Function):
    """A rank's own rows of the sum over all ranks of a mesh."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh, rows = mesh, rows.clone()
        dist.all_reduce(rows, group=mesh.get_group())
        return rows.chunk(mesh.size())[mesh.get_local_rank()]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Gathered.forward(ctx, grad, ctx.mesh), None


# --- shards and wholes ---------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, in its own memory; the tensor itself where it is plain."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor, summed where it is Partial. All ranks must call this."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the gradient, laid out as the parameter. All ranks must call this."""
    grad = param.grad
    if isinstance(grad, DTensor):
        grad = grad.redistribute(placements=param.placements)
    return None if grad is None else local(grad).clone()


def places(param: torch.Tensor) -> torch.Tensor:
    """Flat places in the whole parameter of this rank's elements, in their order. All ranks must call this.

    Each rank numbers its own elements. They are found where torch puts them when it makes a tensor whole.
    """
    if not isinstance(param, DTensor):
        return torch.arange(param.numel())
    mine = torch.arange(local(param).numel(), device=param.device) + (dist.get_rank() << 32)
    numbered = DTensor.from_local(
        mine.reshape(local(param).shape), param.device_mesh, param.placements, run_check=False, shape=param.shape,
        stride=param.stride(),
    )  # fmt: skip
    found = numbered.full_tensor().flatten()
    [at] = torch.where(found >> 32 == dist.get_rank())
    return at[found[at].argsort()]
