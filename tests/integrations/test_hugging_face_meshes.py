"""A Llama and a Mixtral of transformers over meshes: the bits of torch's fused AdamW, and clipping of one process."""

from functools import partial

import pytest
import torch
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401  ranks are forks of a process that imports this file

from tests.support.mesh_runs import STEPS, OneProcess, TorchsOnLocals, beside, each, no_errors
from tests.support.meshes import WORLD, Sharded
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow

CASES = [
    *(Sharded(model, mesh) for model in ("llama", "mixtral") for mesh in ("fsdp", "hsdp", "tp", "fsdp x tp")),
    Sharded("mixtral", "experts"),
    Sharded("llama", "fsdp x tp", narrow=torch.bfloat16),
]


@pytest.mark.parametrize("how", CASES, ids=str)
def test_twenty_steps_have_the_bits_of_torchs_fused_adamw_and_clipped_ones_those_of_one_process(how):
    @on_ranks(WORLD)
    def found(rank):
        cases = [(way, partial(beside, how, way, TorchsOnLocals)) for way in ("plain", "wrap")]
        cases += [("early, clipped", partial(beside, how, "early", OneProcess, clipping=1.3))]
        return each(cases)

    for results in no_errors(found):
        assert {len(reports) for reports in results.values()} == {STEPS}
