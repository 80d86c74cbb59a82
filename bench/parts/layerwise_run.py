"""The contender's end of the steps on disk of ``bench.parts.layerwise``, started with SETTINGS: the GPT of `make
demo-disk`, whose micro-batches go through a loop or through ``engine.accumulate()``.

Each line that it reads names an act: BUILD, LOOP or ACCUMULATE.
"""

import importlib
import json
import time
from typing import Any

from bench.disk_demo import settings as demo_settings
from bench.harness.worker import become_rank
from bench.parts.nvme_run import moved

BUILD, LOOP, ACCUMULATE = "build", "loop", "accumulate()"


class Run:
    """An engine whose parameters lie on disk, and its micro-batches.

    Args:
        settings: ``gpt``, ``param_dtype``, ``nvme_path``, ``tokens`` of a micro-batch, ``micro_batches``,
            ``threads``, and ``layerwise``, which ACCUMULATE needs.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        from bench.train.gpt_torch import GPT
        from frontends.torch import init, wrap
        from offload_core.commands.model_shapes import GPTConfig

        config = {
            **demo_settings(settings["nvme_path"]),
            "num_threads": settings["threads"],
            "layerwise": settings["layerwise"],
            "gradient_accumulation_steps": settings["micro_batches"],
        }
        gpt = GPTConfig(**settings["gpt"])
        torch.manual_seed(0)
        torch.set_default_dtype(getattr(torch, settings["param_dtype"]))
        with init(config=config):
            model = GPT(gpt)
        torch.set_default_dtype(torch.float32)
        self.engine = wrap(model, **config)
        shape = settings["micro_batches"], 1, settings["tokens"] + 1
        tokens = torch.randint(gpt.vocabulary, shape, generator=torch.Generator().manual_seed(1))
        self.batches = [(windows[:, :-1], windows[:, 1:]) for windows in tokens]

    def step(self, act: str) -> dict[str, float]:
        """Train one step, and return its seconds, its mean loss, and the bytes that it read from disks and wrote."""
        before, start = moved(), time.perf_counter()
        if act == ACCUMULATE:
            losses = self.engine.accumulate(self.batches, lambda loss, batch: loss)
            self.engine.step()
        else:
            losses = []
            for batch in self.batches:
                loss = self.engine(*batch)
                losses.append(loss.detach())
                self.engine.backward(loss)
                self.engine.step()
        self.engine.flush()  # the next step is another contender's
        seconds = time.perf_counter() - start
        read, written = (b - a for a, b in zip(before, moved(), strict=True))
        loss = sum(loss.item() for loss in losses) / len(losses)
        return {"seconds": seconds, "loss": loss, "read": read, "written": written}


def main() -> None:
    import torch

    importlib.import_module("frontends.torch")
    (words,), questions, answers = become_rank()
    settings = json.loads(words)
    torch.set_num_threads(settings["threads"])

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    answer(versions={"torch": torch.__version__})
    run: Run | None = None
    for line in questions:
        act = json.loads(line)["act"]
        if run is None:
            run = Run(settings)
            answer()
        else:
            answer(**run.step(act))
    if run is not None:
        run.engine.close()


if __name__ == "__main__":
    main()
