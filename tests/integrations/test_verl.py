"""verl's trainers and workers on an engine of ours, beside the same trainers with torch's fused AdamW."""

import gc
import importlib.util

import pytest
import torch
import torch.distributed as dist

from tests.support import simulated
from tests.support.processes import on_ranks
from tests.support.simulated import collectives

if importlib.util.find_spec("verl") is None:  # its import takes seconds
    pytest.skip("verl is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow
STAGES = {
    "2": ("+engine.offload.stage=2",),
    "3": ("+engine.offload={stage: 3, offload_param: cpu, param_persistence_threshold: 100}",),
}
"""Settings of verl's engine."""
LORA = [(), ("model.lora_rank=4", "model.lora_alpha=8"), ("model.lora_rank=4", "model.lora.merge=true")]
"""Settings of verl's model."""


@pytest.mark.parametrize("lora", LORA, ids=["full", "LoRA", "merged LoRA"])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_verls_fine_tuning_has_the_bits_of_plain_adamw_and_resumes_with_them(tmp_path, n_ranks, lora):
    @on_ranks(n_ranks)
    def found(rank):
        from tests.support import verl_on_cpu

        model, data = str(tmp_path / "model"), str(tmp_path / "talks.parquet")
        if rank == 0:
            verl_on_cpu.write_model(tmp_path / "model")
            verl_on_cpu.write_talks(tmp_path / "talks.parquet", 32)
        dist.barrier()

        def run(name, *settings):
            torch.manual_seed(0)  # adapters are drawn
            config = verl_on_cpu.sft_config(model, data, tmp_path / name, *lora, *settings)
            engine, logged = verl_on_cpu.tuned(config, tmp_path / f"{name}.jsonl")
            weights = [verl_on_cpu.sent(engine, base=base) for base in (True, False)]
            return logged, weights, verl_on_cpu.weights_at_end(engine)

        plain = run("plain", *verl_on_cpu.PLAIN)
        ours = {stage: run(stage, *verl_on_cpu.OURS, *settings) for stage, settings in STAGES.items()}
        resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / '2' / 'global_step_3'}")
        return plain, ours, run("resumed", *verl_on_cpu.OURS, *STAGES["3"], *resume)

    (logged, *_), _, (rest, *_) = found[0]
    assert logged[0][1][1] > 0.1  # so that it is clipped
    assert [line for line in logged if line[0] > 3] == rest
    for plain, ours, resumed in found:
        assert ours == dict.fromkeys(STAGES, plain)
        assert resumed[1:] == plain[1:]


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_verls_ppo_has_the_bits_of_plain_adamw_and_resumes_with_them(tmp_path, n_ranks):
    @on_ranks(n_ranks)
    def found(rank):
        from tests.support import verl_on_cpu, verl_ppo

        run = verl_ppo.runs_in(tmp_path, rank)
        plain = run("plain", *verl_on_cpu.PLAIN)
        save, resume = ["trainer.save_freq=2"], ["trainer.resume_mode=resume_path"]
        ours = {stage: run(stage, *verl_on_cpu.OURS, *settings, more=save) for stage, settings in STAGES.items()}
        resume.append(f"trainer.resume_from_path={tmp_path / '2' / 'global_step_2'}")
        return plain, ours, run("resumed", *verl_on_cpu.OURS, *STAGES["3"], more=resume)

    for (bits, logged), ours, resumed in found:
        assert ours == dict.fromkeys(STAGES, (bits, logged))
        assert resumed == (bits, [line for line in logged if line[0] > 2])


@pytest.mark.skipif(simulated.why_not() is not None, reason=str(simulated.why_not()))
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_while_verl_generates_released_engines_hold_no_memory_of_the_device(tmp_path, n_ranks):
    simulated._built()  # once, before ranks wait for it

    @on_ranks(n_ranks, backend=collectives.BACKEND)
    def found(rank):
        simulated.prepare()
        from tests.support import verl_on_cpu, verl_ppo

        verl_on_cpu.on_simulated_device()
        run = verl_ppo.runs_in(tmp_path, rank)

        def watched(stage, settings, offload):
            held = []

            def watch():
                gc.collect()
                held.append(torch.accelerator.memory_allocated())

            name = f"{stage} {offload}"
            result = run(name, *verl_on_cpu.OURS, *settings, f"engine.param_offload={offload}", watch=watch)
            return result, held

        return [[watched(*stage, offload) for offload in ("false", "true")] for stage in STAGES.items()]

    for stages in found:
        for (kept, held), (released, none) in stages:
            assert released == kept
            assert none == [0, 0, 0]
            assert min(held) > 0
