"""Runs of one small model in the installed DeepSpeed and here, for comparisons."""

import logging
import warnings

import torch

from tests.support.deepspeed_checkpoints import model

GLOBAL_BATCH = 4


def configuration(stage, world_size, **sections):
    """A DeepSpeed configuration that both sides take."""
    return {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **sections,
    }


def groups_of(made):
    """The matrices, and the vectors, which do not decay."""
    trained = [p for p in made.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def batch(step, rank, world_size):
    """This rank's part of a step's batch."""
    ids = torch.randint(0, 7, (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(step))
    return ids[rank * GLOBAL_BATCH // world_size : (rank + 1) * GLOBAL_BATCH // world_size]


def losses_of(engine, steps, rank, world_size, scale=1.0):
    """Train for these steps; the loss of each. ``scale``: of the losses."""
    found = []
    for step in steps:
        loss = engine(batch(step, rank, world_size)).float().pow(2).mean() * scale
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    return found


def even_model():
    """A model of which each of two ranks has whole vectors of 16 elements of every parameter: the bits of torch's fused
    optimizers depend on a remainder."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(8, 32), torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32)
    )


def in_deepspeed(rank, config, optimizer=None, make=model):
    """An engine of DeepSpeed over the model, in the process group that is there.

    Args:
        optimizer: makes one of the groups; None: the configuration's.
        make: makes the model.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        assert isinstance(get_accelerator(), CPU_Accelerator)
        CPU_Accelerator.is_fp16_supported = lambda self: True  # slow here, and right
        deepspeed.utils.logger.setLevel(logging.ERROR)
        deepspeed.init_distributed("gloo", verbose=False)
        made = make()
        groups = groups_of(made)
        given = {} if optimizer is None else {"optimizer": optimizer(groups)}
        config = {**config, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        if optimizer is not None:
            config.pop("optimizer")
        return deepspeed.initialize(model=made, config=config, **(given or {"model_parameters": groups}))[0]
