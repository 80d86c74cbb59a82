"""The targets of whole steps are the large model's, and what could be reached at most stands beside them."""

from bench.harness.contenders import Measurement, Result
from bench.parts import step


def result(forward, backward, update):
    phases = {"forward": forward, "backward": backward, "step": update, "total": forward + backward + update}
    return Result([Measurement([phases], [], 0.0, 0.0, 0.0, 0.0, 0) for _ in range(3)], 0, [])


RESULTS = {
    step.OURS: result(2.0, 4.0, 2.0),
    step.DS_2: result(1.0, 20.0, 11.0),
    step.GRADIENTS_ONLY: result(1.0, 4.0, 0.5),
    step.STREAM: Result([Measurement([{"total": 1.0}], [], 0.0, 0.0, 0.0, 0.0, 0) for _ in range(3)], 0, []),
}


def test_ratios_and_targets():
    known = {each["name"]: (each["p50"], each["target"]) for each in step.ratios_of(RESULTS, "9 M", targets=True)}
    limit = "backward of PyTorch and the streaming limit"
    assert known == {
        "9 M, whole step: DeepSpeed / offload-core": (4.0, 3.5),
        "9 M, step: DeepSpeed / offload-core": (11 / 3, 1.25),  # what the update moved into the next forward counts
        "9 M, backward + step: DeepSpeed / offload-core": (31 / 7, 4.0),
        f"9 M, whole step: offload-core / forward and {limit}": (8 / 6, 1.1),
        f"9 M, at most possible: whole step, DeepSpeed / forward and {limit}": (32 / 6, None),
        f"9 M, at most possible: backward + step, DeepSpeed / {limit}": (31 / 5, None),
    }
    notes = {each["name"]: each["note"] for each in step.ratios_of(RESULTS, "9 M", targets=True) if "note" in each}
    assert [(name, note.partition(";")[0].split()[-1]) for name, note in notes.items()] == [
        ("9 M, whole step: DeepSpeed / offload-core", "5.33"),
        ("9 M, backward + step: DeepSpeed / offload-core", "6.20"),
    ]
    assert not any(each["target"] for each in step.ratios_of(RESULTS, "9 M", targets=False))
    assert step.LARGEST in step.MODELS
