"""verl's PPO loop on the CPU: its driver, its workers and its losses, without Ray and without an inference server.

Each rank runs the driver. A group of workers is then one worker on each rank, which is given this rank's part of a
batch. Hugging Face's ``generate`` takes the place of the inference server, with the weights that verl's worker sends.
"""

import asyncio
import os
from types import SimpleNamespace

from tests.support import verl_on_cpu  # first: it changes modules

# isort: split
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout import base
from verl.workers.utils.losses import value_loss

base._ROLLOUT_REGISTRY["receiver", "async"] = f"{__name__}.Receiver"
PROMPT, RESPONSE = 10, 8
LOGGED = ("actor/pg_loss", "actor/kl_loss", "actor/entropy_loss", "actor/grad_norm", "critic/vf_loss",
          "critic/grad_norm", "critic/rewards/mean", "actor/lr", "critic/lr")  # fmt: skip


class Receiver(base.BaseRollout):
    """An inference engine: it takes weights one by one, and generates with them."""

    def __init__(self, config, model_config, device_mesh):
        super().__init__(config, model_config, device_mesh)
        self.model = AutoModelForCausalLM.from_pretrained(model_config.local_path)
        self.step = 0
        """The step whose weights it has."""

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, peft_config=None, global_steps=0, **kwargs):
        self.step, whole = global_steps, self.model.state_dict()
        for name, weight in weights:
            whole.pop(name).copy_(weight)
        assert not whole, f"no values for {[*whole]}"

    def generate(self, prompts, tokenizer):
        """Sample an answer to each of these conversations, and reward even words."""
        tokenizer.padding_side = "left"
        asked = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding="max_length", max_length=PROMPT,
            return_tensors="pt", return_dict=True,
        )  # fmt: skip
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.step)
            whole = self.model.generate(
                **asked, max_new_tokens=RESPONSE, min_new_tokens=3, do_sample=True, pad_token_id=tokenizer.pad_token_id
            )
        said = torch.nn.functional.pad(whole[:, PROMPT:], (0, PROMPT + RESPONSE - whole.shape[1]))
        mask = (said != tokenizer.pad_token_id).long()
        attention = torch.cat([asked["attention_mask"], mask], 1)
        scores = torch.zeros(said.shape)
        last = mask.sum(1) - 1
        scores[torch.arange(len(said)), last] = ((said % 2 == 0) * mask).sum(1) / mask.sum(1)
        return {
            "prompts": asked["input_ids"], "responses": said, "response_mask": mask, "attention_mask": attention,
            "input_ids": torch.cat([asked["input_ids"], said], 1), "rm_scores": scores,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        }  # fmt: skip


class Group:
    """A worker on each rank, as verl's driver calls them: the batch is split, and the results are put together."""

    def __init__(self, worker, *, deferred=False):
        self.worker, self.deferred = worker, deferred

    def __getattr__(self, name):
        method, n_ranks = getattr(self.worker, name), dist.get_world_size()

        def call(*args, **kwargs):
            if not (args and isinstance(args[0], TensorDict)):
                return method(*args, **kwargs)
            part = tensordict_utils.chunk_tensordict(args[0], n_ranks)[dist.get_rank()]
            of_each = [None] * n_ranks
            dist.all_gather_object(of_each, method(part))
            found = tensordict_utils.concat_tensordict(of_each)
            return SimpleNamespace(get=lambda: found) if self.deferred else found

        return call


class Rollouts:
    """What verl's driver calls of the inference server, and of the transfer of weights to it.

    Args:
        watch: is called before each generation.
    """

    def __init__(self, actor, tokenizer, watch):
        self.actor, self.tokenizer, self.watch = actor, tokenizer, watch

    def generate_sequences(self, batch):
        self.watch()
        said = self.actor.rollout.generate(
            [list(talk) for talk in batch.non_tensor_batch["raw_prompt"]], self.tokenizer
        )
        nothing = np.array([{}] * len(batch), dtype=object)
        return DataProto.from_dict(said, {"multi_modal_inputs": nothing}, {"timing": {}})

    def update_weights(self, step):
        asyncio.run(self.actor.update_weights(step, mode="naive"))

    def sleep_replicas(self):
        pass


def write_prompts(file, n_rows):
    """Write prompts of several lengths, as verl's data sets read them."""
    draw = torch.Generator().manual_seed(1)
    words = [torch.randint(verl_on_cpu.WORDS, (3 + i % 4,), generator=draw).tolist() for i in range(n_rows)]
    talks = [[{"role": "user", "content": " ".join(f"w{i}" for i in each)}] for each in words]
    pd.DataFrame({"prompt": talks, "data_source": "words"}).to_parquet(file)
    return str(file)


def config(model, data, folder, *overrides):
    """verl's own configuration of PPO, with these settings and few others."""
    actor, critic = "actor_rollout_ref.actor", "critic"
    return verl_on_cpu.composed(
        "ppo_trainer", f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}",
        *(f"{each}.model.use_remove_padding=false" for each in ("actor_rollout_ref", critic)),
        *(f"+{each}.model.override_config.attn_implementation=sdpa" for each in ("actor_rollout_ref", critic)),
        f"data.train_files={data}", f"data.val_files={data}", "data.train_batch_size=8",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}", "data.dataloader_num_workers=0", "data.filter_overlong_prompts=false",
        "actor_rollout_ref.rollout.name=receiver", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"{actor}.use_kl_loss=true", f"{actor}.kl_loss_coef=0.1", f"{actor}.entropy_coeff=0.01",
        f"{actor}.ppo_mini_batch_size=4", f"{actor}.ppo_micro_batch_size_per_gpu=1", f"{actor}.optim.lr=1e-2",
        f"{actor}.optim.clip_grad=0.1", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2", f"{critic}.ppo_micro_batch_size_per_gpu=1",
        f"{critic}.optim.lr=1e-2", f"{critic}.optim.clip_grad=0.1", "trainer.device=cpu", "trainer.logger=[file]",
        "trainer.val_before_train=false", "trainer.balance_batch=false", "trainer.total_epochs=1",
        "trainer.use_v1=false",
        f"trainer.default_local_dir={folder}", *overrides,
    )  # fmt: skip


def of_all(engine):
    """Settings that choose an engine for the actor, the reference and the critic, from one for an engine."""
    places = {"actor_rollout_ref.actor": "fsdp_config", "actor_rollout_ref.ref": "fsdp_config", "critic": "fsdp"}
    for place, field in places.items():
        for setting in engine:
            name = setting.replace("engine.", f"{place}.{field}.")
            yield name if "strategy=" not in name else f"{place}.strategy={setting.split('=')[1]}"


class Trainer(RayPPOTrainer):
    """verl's driver, with a worker of each kind in this process."""

    def begin(self, watch):
        of_actor = self.config.actor_rollout_ref
        actor = ActorRolloutRefWorker(of_actor, "actor_rollout_ref")
        actor.init_model()
        of_critic = omega_conf_to_dataclass(self.config.critic)
        of_critic.engine.infer_micro_batch_size_per_gpu = of_critic.ppo_micro_batch_size_per_gpu
        of_critic.engine.micro_batch_size_per_gpu = of_critic.ppo_micro_batch_size_per_gpu
        of_critic.engine.use_dynamic_bsz = False
        critic = TrainingWorker(
            TrainingWorkerConfig(
                model_type="value_model", model_config=of_critic.model, engine_config=of_critic.engine,
                optimizer_config=of_critic.optim, checkpoint_config=of_critic.checkpoint,
            )
        )  # fmt: skip
        critic.reset()
        critic.set_loss_fn(lambda **named: value_loss(config=of_critic, **named))
        self.actor_rollout_wg, self.critic_wg = Group(actor), Group(critic, deferred=True)
        self.ref_policy_wg = self.actor_rollout_wg
        self.checkpoint_manager = self.async_rollout_manager = Rollouts(actor, self.tokenizer, watch)


def trained(config, log, watch=lambda: None):
    """Run verl's trainer; return the engines of actor, critic and reference, and what was logged.

    Args:
        log: the file, of this rank: each runs the driver.
        watch: as of :class:`Rollouts`.
    """
    torch.manual_seed(0)  # the critic's head is drawn
    os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    trainer = Trainer(config, tokenizer, {Role.ActorRolloutRef: None}, SimpleNamespace(get_n_gpus=lambda: 1))
    trainer.begin(watch)
    trainer.fit()
    actor, critic = trainer.actor_rollout_wg.worker, trainer.critic_wg.worker
    return [worker.engine for worker in (actor.actor, critic, actor.ref)], verl_on_cpu.logged(log, LOGGED)


def runs_in(folder, rank):
    """Write a model and prompts to this folder, and return a function that trains with them."""
    if rank == 0:
        verl_on_cpu.write_model(folder / "model")
        write_prompts(folder / "prompts.parquet", 24)
    dist.barrier()

    def run(name, *engine, more=(), watch=lambda: None):
        settings = config(folder / "model", folder / "prompts.parquet", folder / name, *of_all(engine), *more)
        engines, logged = trained(settings, folder / f"{name} {rank}.jsonl", watch)
        return [verl_on_cpu.weights_at_end(engine) for engine in engines], logged

    return run
