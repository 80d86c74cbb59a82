"""A model for Lightning's Trainer with its optimizers, and runs of it."""

import warnings
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from bench.train.gpt_torch import GPT
from frontends.torch import OffloadedAdamW
from offload_core.commands.model_shapes import GPTConfig

LR, DECAY, CLIP, EPOCHS, BATCHES = 1e-2, 0.1, 0.25, 2, 5
TOKENS = torch.randint(64, (2 * BATCHES, 12), generator=torch.Generator().manual_seed(1))


def ours(module, **fields):
    return OffloadedAdamW(module.parameters(), lr=LR, weight_decay=DECAY, **fields)


def torchs(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    optimizer._step_supports_amp_scaling = False  # else it unscales by itself, and Lightning refuses to clip
    return optimizer


def engines(module):
    return module.trainer.strategy.wrap(lr=LR, weight_decay=DECAY).optimizer


class Model(pl.LightningModule):
    """A GPT of two layers, a schedule of the updates, and a record of what it saw."""

    def __init__(self, new=ours, *, dropout=0.1, late=False):
        super().__init__()
        self.new, self.dropout = new, dropout
        self.seen = []
        """Of each batch the loss and the learning rate."""
        self.gpt = None
        if not late:
            self.configure_model()

    def configure_model(self):
        if self.gpt is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.gpt = GPT(GPTConfig(vocabulary=64, positions=16, layers=2, width=32, heads=2))
            for block in self.gpt.blocks:
                block.register_forward_hook(lambda m, args, out: F.dropout(out, self.dropout, m.training))

    def loss(self, tokens):
        return self.gpt(tokens[:, :-1], tokens[:, 1:])

    def training_step(self, tokens, batch_idx):
        loss = self.loss(tokens)
        self.seen.append((float(loss.detach()), self.optimizers().param_groups[0]["lr"]))
        return loss

    def validation_step(self, tokens, batch_idx):
        self.log("valid", self.loss(tokens))

    def configure_optimizers(self):
        optimizer = self.new(self)
        schedule = LambdaLR(optimizer, lambda update: 1 / (1 + update))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer_of(folder, strategy="auto", *, save_every=None, **settings):
    settings = {
        "max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "limit_val_batches": 0, "use_distributed_sampler": False,
        "enable_checkpointing": save_every is not None,
    } | settings  # fmt: skip
    if save_every is not None:
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=save_every, save_top_k=-1)
        settings["callbacks"] = [*settings.get("callbacks", ()), saver]
    return pl.Trainer(strategy=strategy, default_root_dir=folder, **settings)


@contextmanager
def quiet():
    """Lightning advises more workers, and warns of folders that are not empty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fitted(folder, model, strategy="auto", *, resume=None, weights_only=None, batch_size=2, **settings):
    torch.manual_seed(2)
    loader = DataLoader(TOKENS, batch_size=batch_size)
    with quiet():
        model.fitting = trainer_of(folder, strategy, **settings)
        model.fitting.fit(model, loader, ckpt_path=resume, weights_only=weights_only)
    return model


STAGES = {2: {"stage": 2}, 3: {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 100}}


def weights_of(model):
    engine = model.fitting.strategy.engine
    optimizer = engine.optimizer
    return {name: optimizer.whole_states(p)["master"] if optimizer.config.stage == 3 else p.detach()
            for name, p in model.named_parameters()}  # fmt: skip
