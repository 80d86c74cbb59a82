"""Helpers that tests with Hugging Face's libraries share."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from frontends.torch import OffloadedAdamW
from frontends.torch.integrations.trainer import OffloadTrainer
from frontends.torch.integrations.transformers import offloaded_adamw
from tests.support.torch_models import same_bits
from tests.support.torch_rank import bits

STEPS, EPOCH, CLIP, LR = 8, 4, 0.5, 1e-2
OFFLOADED = {"optimizer_cls_and_kwargs": (OffloadedAdamW, {"lr": LR})}
ARGUMENTS = lambda args: {"optimizer_cls_and_kwargs": offloaded_adamw(args)}  # noqa: E731
TORCHS = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": LR, "fused": True})}
TOKENS = torch.randint(64, (4 * EPOCH, 12), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": row, "labels": row} for row in TOKENS]


STAGES = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2, early": {"stage": 2, "update_in_backward": True},
    "3": {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 100},
}
"""Settings of ``OffloadTrainer``."""


@pytest.fixture(scope="module", autouse=True)
def alone():
    """No network, and one thread of torch: for models this small more only wait for each other."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield
    torch.set_num_threads(n_threads)


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1)  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


class Generated(TrainerCallback):
    """Generates in the middle of the run, and notes what it got and where gradients are before an update."""

    def __init__(self):
        self.tokens, self.kinds = [], set()

    def on_step_end(self, args, state, control, model, **kwargs):
        model.eval()
        prompt = torch.tensor([[3, 1, 4]])
        self.tokens.append(model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist())
        model.train()

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.kinds |= {type(p.grad) for p in model.parameters()}


class ExactNorm(Trainer):
    """Clips by the norm of the sum of squares in float64, as an engine does."""

    def _clip_grad_norm(self, model):
        norm = sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None).sqrt()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_((self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0).float())
        return norm


RANKS = {"per_device_train_batch_size": 1, "ddp_backend": "gloo"}
"""TrainingArguments of two ranks."""


class MeanOfRanks(ExactNorm):
    """Averages each micro-step's gradients over the ranks by hand, and sums them; nothing is around the model."""

    def create_optimizer(self, model=None):
        self.model._is_accelerate_prepared = True
        return super().create_optimizer(model)

    def training_step(self, *args, **kwargs):
        trained = [p for p in self.model.parameters() if p.requires_grad]
        before = [p.grad for p in trained]
        self.model.zero_grad()
        loss = super().training_step(*args, **kwargs)
        for p, earlier in zip(trained, before, strict=True):
            of_each = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(of_each, p.grad)
            mean = sum(of_each) / len(of_each)
            p.grad = mean if earlier is None else earlier + mean
        return loss


def told(trainer, generated=None):
    """The bits of the master weights, what was logged of losses, and what was generated."""
    masters = [torch.nn.Parameter(states["master"]) for states in states_of(trainer).values()]
    losses = [[entry.get("loss"), entry.get("eval_loss")] for entry in trainer.state.log_history[:-1]]
    tokens = None if generated is None else generated.tokens
    return bits(SimpleNamespace(parameters=lambda: masters)), losses, tokens


def trainer_of(
    folder, optimizer=OFFLOADED, *, kind=Trainer, model=None, model_init=None, callbacks=(), evaluated=None, **settings
):
    """A Trainer that accumulates, clips, decays, warms up, and saves in the middle and at the end of an epoch.

    ``optimizer``: Trainer's arguments for it, or a function of the TrainingArguments that returns these.
    """
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "max_grad_norm": CLIP,
        "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 1, "save_steps": 2,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
    } | settings  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **settings)
    model = llama() if model is None and model_init is None else model
    optimizer = optimizer(arguments) if callable(optimizer) else optimizer
    data = {"train_dataset": DATA, "eval_dataset": evaluated, "model_init": model_init}
    return kind(model, arguments, **data, callbacks=list(callbacks), **optimizer)


def trained(*args, resume=None, **kwargs):
    trainer = trainer_of(*args, **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def on_engine(folder, stage, *, resume=None, **settings):
    """A run of ``OffloadTrainer`` with the same learning rate."""
    fields = STAGES[stage] if isinstance(stage, str) else stage
    settings = {"learning_rate": LR, "kind": OffloadTrainer, **settings}
    return trained(folder, {"offload": fields}, resume=resume, **settings)


def states_of(trainer):
    """Master weights and moments of what is trained, by the model's names."""
    found = {}
    for name, p in trainer.model.named_parameters():
        if not p.requires_grad:
            continue
        if isinstance(trainer, OffloadTrainer):
            found[name] = trainer.engine.optimizer.whole_states(p)
        else:
            state = {key: value for key, value in trainer.optimizer.state[p].items() if key != "step"}
            found[name] = {**state, "master": p.detach()}
    return found


def logged(trainer):
    """Norms apart: torch rounds them to float32."""
    keys = ("step", "loss", "learning_rate", "eval_loss")
    return [[entry[key] for key in keys if key in entry] for entry in trainer.state.log_history[:-1]]


def norms(trainer):
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def assert_same_run(one, other):
    assert logged(one) == logged(other)
    mine, theirs = states_of(one), states_of(other)
    assert mine.keys() == theirs.keys()
    for name, states in mine.items():
        for key, value in states.items():
            assert same_bits(value, theirs[name][key]), (name, key)
