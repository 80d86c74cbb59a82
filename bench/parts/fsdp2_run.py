"""The contender's end of the resumes of ``bench.parts.fsdp2``, started with NAME SETTINGS: one rank that builds a model
under FSDP2 and its optimizer, and saves their states or loads them.

Each line that it reads names an act. The answer to a save or a load has the seconds of its phases, and sums of bits.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.harness.worker import become_rank

DCP_TORCH = "torch AdamW, dcp.load"
DCP_OURS = "offload-core, dcp.load"
CHECKPOINT = "offload-core, its checkpoint"
_STATES = ("exp_avg", "exp_avg_sq")
_LEAST, _MOST = 1e-4, 1e-2
"""Bounds of parameters and states."""


class Run:
    """A model under FSDP2 in fp32, with AdamW."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard

        from bench.train.gpt_torch import GPT
        from frontends.torch import wrap
        from offload_core.commands.model_shapes import GPTConfig

        self.name, self.folder = name, Path(settings["folder"])
        with torch.device("meta"):
            self.model = GPT(GPTConfig(**settings["gpt"]))
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.model.to_empty(device="cpu")
        for p in self.model.parameters():
            p.to_local().detach().fill_(_LEAST)
        self.engine: Any = None
        if name == DCP_TORCH:
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        else:
            self.engine = wrap(self.model, lr=1e-3, num_threads=settings["threads"])
            self.optimizer = self.engine.optimizer

    def save(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the phases of a save, after drawing parameters and states."""
        self._draw()
        if self.name == CHECKPOINT:
            yield "write", lambda: self.engine.save_checkpoint(self.folder)
        else:
            import torch.distributed.checkpoint as dcp

            states: dict[str, Any] = {}
            yield "state dict", lambda: states.update(self._states())
            yield "write", lambda: dcp.save(states, checkpoint_id=self.folder)

    def load(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the phases of a load."""
        if self.name == CHECKPOINT:
            yield "read", lambda: self.engine.load_checkpoint(self.folder)
        else:
            import torch.distributed.checkpoint as dcp
            from torch.distributed.checkpoint.state_dict import set_state_dict

            states: dict[str, Any] = {}

            def take() -> None:
                given = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
                set_state_dict(self.model, self.optimizer, **given)

            yield "state dict", lambda: states.update(self._states())
            yield "read", lambda: dcp.load(states, checkpoint_id=self.folder)
            yield "set", take

    def _states(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _draw(self) -> None:
        """Set parameters and states to random values, other ones on each rank."""
        import torch
        import torch.distributed as dist

        torch.manual_seed(dist.get_rank())
        for p in self.model.parameters():
            p.to_local().detach().uniform_(_LEAST, _MOST)
            if self.name == DCP_TORCH:
                states = {key: torch.empty_like(p, requires_grad=False) for key in _STATES}
                self.optimizer.state[p] = {"step": torch.tensor(1.0), **states}
            for key in _STATES:
                self.optimizer.state[p][key].to_local().uniform_(_LEAST, _MOST)

    def sums(self) -> list[int]:
        """Return the sum of the bits of parameters, and of each state, over all ranks: the same for any sharding."""
        import torch
        import torch.distributed as dist

        sums = torch.zeros(1 + len(_STATES), dtype=torch.int64)
        for p in self.model.parameters():
            for i, tensor in enumerate([p, *(self.optimizer.state[p][key] for key in _STATES)]):
                sums[i] += tensor.to_local().detach().view(torch.int32).sum(dtype=torch.int64)
        dist.all_reduce(sums)
        return sums.tolist()


def main() -> None:
    import torch
    import torch.distributed as dist

    importlib.import_module(sys.argv[1])
    for module in ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"):
        importlib.import_module(module)
    (name, words), questions, answers = become_rank()
    settings = json.loads(words)
    torch.set_num_threads(settings["threads"])
    dist.init_process_group("gloo")

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    answer()
    run: Run | None = None
    for line in questions:
        act = json.loads(line)["act"]
        if run is None:
            run = Run(name, settings)
            answer()
            continue
        seconds = {}
        for phase, do in run.save() if act == "save" else run.load():
            dist.barrier()
            start = time.perf_counter()
            do()
            seconds[phase] = time.perf_counter() - start
        answer(seconds=seconds, sums=run.sums())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
