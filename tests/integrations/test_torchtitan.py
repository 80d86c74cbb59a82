"""torchtitan's training loop with our optimizer, as docs/integrations/torchtitan.md has it."""

import shutil
import sys
import warnings

import pytest
import torch.distributed as dist
import torchtitan  # noqa: F401  # skipped without it

from tests.support.processes import ROOT, on_ranks
from tests.support.torch_rank import local_bits

PAGE = ROOT / "docs" / "integrations" / "torchtitan.md"


@pytest.mark.slow
def test_torchtitan_trains_and_resumes_with_the_bits_of_its_own_adamw(tmp_path):
    [script] = PAGE.read_text().split("```python\n# titan_offload.py\n")[1:]
    (tmp_path / "titan_offload.py").write_text(script.split("```")[0])

    @on_ranks(2)
    def found(rank):
        warnings.simplefilter("ignore")

        from tests.support import titan_on_cpu

        sys.path.insert(0, str(tmp_path))
        import titan_offload

        def run(config, folder):
            trainer = titan_on_cpu.trained(titan_on_cpu.on_cpu(config, tmp_path / folder))
            [optimizer] = trainer.optimizers
            told = trainer.step, type(optimizer).__name__, local_bits(trainer.model_parts[0], optimizer)
            trainer.close()
            return told

        theirs = run(titan_on_cpu.llama3_debugmodel(), "theirs")
        ours = run(titan_offload.llama3_offloaded(), "ours")
        if rank == 0:
            shutil.rmtree(tmp_path / "ours" / "checkpoint" / "step-6")
        dist.barrier()
        return theirs, ours, run(titan_offload.llama3_offloaded(), "ours")

    for theirs, ours, again in found:
        assert ours == again
        assert ours[:2] == (6, "OffloadedAdamW")
        assert theirs[:2] == (6, "AdamW")
        assert ours[2] == theirs[2]
