"""A small GPT, its data, and its training by an engine in several ways."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from offload_core.prove.worker import LeftOut, Place
from offload_core.support import optional

from ..engine import Engine, wrap
from ..optim.optimizer import OffloadedAdamW

VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH, BATCH = 1001, 36, 3, 3, 16, 8
"""Few sizes are multiples of 8, so that each tensor has a tail."""
Arrays = Iterator[tuple[str, Any]]
torch.optim.SGD([torch.zeros(1)])  # imports torch's compiler, once for all processes that are forked from here


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 5 * WIDTH + 7), nn.Linear(5 * WIDTH + 7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        q, k, v = self.attention(self.before(x)).view(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(mask, -1e4).softmax(-1)
        x = x + self.project((weights @ v).transpose(1, 2).reshape(n, length, -1))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    """With ``labels`` it returns the loss, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.tokens(input_ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else {"loss": loss_of(logits, labels)}


def model_of(place: Place) -> Gpt:
    """The model as each way begins, on the device."""
    torch.set_num_threads(1)  # the framework's own sums may depend on it
    if place.device != "cpu":
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    return Gpt().to(place.device)


def tokens_of(step: int, micro_batch: int, device: str) -> torch.Tensor:
    random = np.random.default_rng((step, micro_batch))
    return torch.from_numpy(random.integers(VOCABULARY, size=(BATCH, LENGTH))).to(device)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def batches_of(place: Place, step: int) -> list[torch.Tensor]:
    """The micro-batches of this rank in an update."""
    numbers = range(place.rank, place.micro_batches, place.ranks) if place.micro_batches > 1 else (0,)
    return [tokens_of(step, number, place.device) for number in numbers]


@contextmanager
def joined(place: Place) -> Iterator[None]:
    """This rank is in a process group with the others."""
    if place.device != "cpu":
        if (count := torch.accelerator.device_count()) < place.ranks:
            raise LeftOut(f"needs {place.ranks} devices, and torch sees {count}")
        torch.accelerator.set_device_index(place.rank)
    elif not (dist.is_available() and dist.is_gloo_available()):
        raise LeftOut("needs gloo, which this build of torch lacks")
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    os.environ.update(dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), *loopback) if loopback else {})
    backend = dist.get_default_backend_for_device(place.device)
    store = f"file://{place.folder}/store"
    dist.init_process_group(backend, init_method=store, rank=place.rank, world_size=place.ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def together(program: Callable[[Place], Arrays]) -> Callable[[Place], Arrays]:
    """The program in a process group, where it has several ranks."""

    def run(place: Place) -> Arrays:
        with joined(place) if place.ranks > 1 else nullcontext():
            yield from program(place)

    return run


def trained(engine: Engine, place: Place, update: Callable[[int], object]) -> Arrays:
    """Run the updates between a load and a save of a checkpoint. Yield the weights as the model runs with them."""
    place.load(engine.load_checkpoint)
    for step in range(place.first, place.last):
        update(step)
    yield from finished(engine, place)


def finished(engine: Engine, place: Place) -> Arrays:
    engine.save_checkpoint(place.checkpoints)
    for name, weight in engine.named_weights():
        yield f"weight/{name}", weight.float().numpy()
    engine.close()


def wrapped(model: nn.Module, place: Place, **more: Any) -> Engine:
    accumulated = len(batches_of(place, 0))
    return wrap(model, gradient_accumulation_steps=accumulated, **dict(place.settings), **more)


def one_after_the_other(engine: Engine, place: Place, step: int) -> None:
    for tokens in batches_of(place, step):
        engine.backward(loss_of(engine(tokens), tokens))
        engine.step()


@together
def engine(place: Place) -> Arrays:
    """The loop that README shows."""
    made = wrapped(model_of(place), place)
    yield from trained(made, place, partial(one_after_the_other, made, place))


def states_on_device(place: Place) -> Arrays:
    """The loop of :func:`engine`; left out on a CPU, where the device's memory is the host's."""
    if place.device == "cpu":
        raise LeftOut("needs a device with memory of its own")
    yield from engine(place)


def usable(place: Place) -> Arrays:
    """Nothing of a training: torch has this device, or says why not."""
    yield "tensor", torch.zeros(1, device=place.device).cpu().numpy()


@together
def layerwise(place: Place) -> Arrays:
    try:
        optional.library("greenlet", "torch", "engine.accumulate()")
    except ModuleNotFoundError as error:
        raise LeftOut(str(error)) from None
    made = wrapped(model_of(place), place, layerwise=True)

    def update(step: int) -> None:
        made.accumulate(batches_of(place, step), loss_of)
        made.step()

    yield from trained(made, place, update)


@together
def released(place: Place) -> Arrays:
    made = wrapped(model_of(place), place)

    def update(step: int) -> None:
        one_after_the_other(made, place, step)
        with made.released():
            pass

    yield from trained(made, place, update)


def optimizer(place: Place) -> Arrays:
    """The optimizer alone, in a loop of torch."""
    model = model_of(place)
    made = OffloadedAdamW(model.named_parameters(), **dict(place.settings))
    for step in range(place.first, place.last):
        for tokens in batches_of(place, step):
            loss_of(model(tokens), tokens).backward()
        made.step()
        made.zero_grad()
    yield from states_of(made, model)
    made.close()


def states_of(made: Any, model: nn.Module) -> Arrays:
    """An optimizer's states, with names as a checkpoint has them, and the weights."""
    for name, p in model.named_parameters():
        whole = partial(_whole, device=p.device)
        yield f"weight/{name}", whole(p).float().numpy()
        state = made.state[p]
        yield f"master/{name}", whole(state.get("master", p)).numpy()
        for key in ("exp_avg", "exp_avg_sq"):
            yield f"{key}/{name}", whole(state[key]).numpy()


def _whole(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.cpu()


def sharded(place: Place, **options: Any) -> nn.Module:
    """The model, sharded by FSDP2."""
    model = model_of(place)
    mesh = init_device_mesh(torch.device(place.device).type, (place.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


@together
def fsdp2(place: Place) -> Arrays:
    made = wrapped(sharded(place), place)
    yield from trained(made, place, partial(one_after_the_other, made, place))


def deepspeed(place: Place) -> Arrays:
    """A script of DeepSpeed, with its import changed."""
    from frontends.torch import deepspeed

    adamw = {"type": "AdamW", "params": dict(place.settings)}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": adamw,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    model = model_of(place)
    made, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    yield from trained(made, place, partial(one_after_the_other, made, place))


def trainer(place: Place) -> Arrays:
    """Hugging Face's Trainer."""
    try:
        import accelerate  # noqa: F401
        from transformers import TrainingArguments
    except ImportError as error:
        raise LeftOut(f"needs transformers and accelerate: {error}") from None
    from ..integrations.trainer import OffloadTrainer

    class InOrder(OffloadTrainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=BATCH)  # type: ignore[arg-type]

        def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
            return [name for name, _ in model.named_parameters()]

    rows = [row for step in range(place.first, place.last) for row in batches_of(place, step)[0]]
    settings = place.settings
    arguments = TrainingArguments(
        "runs", max_steps=place.last, per_device_train_batch_size=BATCH, learning_rate=settings["lr"],
        weight_decay=settings["weight_decay"], lr_scheduler_type="constant", max_grad_norm=0, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        use_cpu=place.device == "cpu",
    )  # fmt: skip
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    made = InOrder(model_of(place), arguments, train_dataset=data)
    made.train()
    assert made.engine is not None
    yield from finished(made.engine, place)
