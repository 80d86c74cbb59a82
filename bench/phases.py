"""The picture of docs/phases.md: device memory over two rounds of training and generation.

``python -m bench.phases`` writes ``docs/pictures/phases.svg``. The bytes are those that the allocator of the tests'
simulated accelerator has given out; a copy of the weights stands for an inference engine.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from bench.plots import pyplot
from frontends.torch import Engine, wrap
from tests.support import simulated

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "phases.svg"
WIDTH, LAYERS, BATCH = 512, 6, 128
ROUNDS, STEPS, TOKENS = 2, 2, 8


class Recorder:
    """The device's bytes at one moment after the other, and the phase of each."""

    def __init__(self) -> None:
        self.n_bytes: list[int] = []
        self.phases: list[str] = []
        self.phase = ""

    def note(self, *_: object) -> None:
        """Note the bytes now."""
        torch.accelerator.synchronize()
        self.n_bytes.append(torch.accelerator.memory_allocated())
        self.phases.append(self.phase)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield each phase with the numbers of its first moment and of the one after its last."""
        begin = 0
        for i in range(1, len(self.phases) + 1):
            if i == len(self.phases) or self.phases[i] != self.phases[begin]:
                yield self.phases[begin], begin, i
                begin = i


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def record() -> Recorder:
    """Train and generate in turn on the simulated accelerator."""
    simulated.load()
    torch.manual_seed(0)
    recorder = Recorder()
    model = nn.Sequential(*(layer() for _ in range(LAYERS))).to(simulated.NAME)
    for module in model:
        module.register_forward_hook(recorder.note)
        module.register_full_backward_pre_hook(recorder.note)
    engine = wrap(model, param_dtype="bfloat16", reduce_bucket_size=WIDTH * WIDTH)
    for _ in range(ROUNDS):
        recorder.phase = "train"
        for _ in range(STEPS):
            train(engine)
            recorder.note()
        recorder.phase = "generate"
        engine.release()
        recorder.note()
        generate(engine, recorder)
        recorder.note()
        engine.restore()
    engine.close()
    return recorder


def train(engine: Engine) -> None:
    inputs = torch.randn(BATCH, WIDTH).to(simulated.NAME).requires_grad_()  # hooks see a gradient of theirs
    engine.backward(engine(inputs).float().pow(2).mean())
    engine.step()


def generate(engine: Engine, recorder: Recorder) -> None:
    """Fill an engine's weights, a bucket at a time, and have its cache grow."""
    weights, cache = {}, []
    for name, tensor in engine.named_weights(dtype="bfloat16"):
        weights[name] = tensor.to(simulated.NAME)
        recorder.note()
    for _ in range(TOKENS):
        cache.append(torch.zeros(BATCH, LAYERS, 2 * WIDTH, dtype=torch.bfloat16, device=simulated.NAME))
        recorder.note()


def main() -> None:
    with simulated.available():
        recorder = record()
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 2.6))
    megabytes = [n / 1e6 for n in recorder.n_bytes]
    for phase, begin, end in recorder.spans():
        color = {"train": "#2a6f97", "generate": "#a9a9a9"}[phase]
        axes.fill_between(range(begin, end), megabytes[begin:end], step="mid", color=color, alpha=0.8)
        words = {"train": "offload-core trains", "generate": "released: an inference engine"}[phase]
        axes.text((begin + end - 1) / 2, 1.04 * max(megabytes), words, ha="center", fontsize=8)
    axes.set_ylim(0, 1.15 * max(megabytes))
    axes.set_xlim(0, len(megabytes) - 1)
    axes.set_ylabel("MB on the device")
    axes.set_xticks([])
    axes.set_xlabel("layers, weights and tokens, in the order of time")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None})
    print(PICTURE)


if __name__ == "__main__":
    main()
