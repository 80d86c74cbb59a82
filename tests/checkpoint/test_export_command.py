"""``python -m offload_core export``: the weights of a checkpoint, whole, without what trained it."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from offload_core.__main__ import main
from offload_core.checkpoint.safetensors import read_header
from offload_core.checkpoint.saved_weights import SavedWeights
from offload_core.checkpoint.shard_writer import Source
from offload_core.layout.regions import Region
from tests.support.checkpoints import names_of, one_step, save
from tests.support.pipelines import make

FROZEN, COUNT = np.float32([[1.25, -0.0, 3], [np.nan, np.inf, 1e-40]]), np.array(7)


@pytest.fixture
def saved(tmp_path):
    """The folder, and the masters that were saved, by name."""
    subject, folder = make(stage=1), tmp_path / "saved"
    masters = []
    for step in (1, 2):
        one_step(subject)
        masters.append({name: subject.states(i)[0].copy() for i, name in enumerate(names_of(subject))})
        save(
            subject,
            folder,
            step=step,
            sources=[
                Source.of("frozen", "param", Region((2, 3), 0, 6), FROZEN),
                Source.of("count", "param", Region((), 0, 1), COUNT),
            ],
            shapes={"frozen": (FROZEN.shape, FROZEN.dtype), "count": ((), COUNT.dtype)},
            front_end="torch",
        )
    return folder, masters


def export(capsys, *arguments):
    status = main(["export", *map(str, arguments)])
    return status, capsys.readouterr()


def test_the_latest_checkpoints_masters_are_written(saved, tmp_path, capsys):
    folder, masters = saved
    status, said = export(capsys, folder, tmp_path / "out")
    assert (status, said.err) == (0, "")
    assert said.out.startswith(f"{tmp_path / 'out'}: {len(masters[1]) + 2} tensors, ")
    assert said.out.endswith(f"from {folder / 'step-00000002'}, step 2\n")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, master in masters[1].items():
        assert found[name].tobytes() == master.tobytes(), name
    assert found["frozen"].tobytes() == FROZEN.tobytes()
    assert found["count"] == 7
    assert export(capsys, folder / "step-00000001", tmp_path / "out")[0] == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(found[name].tobytes() == master.tobytes() for name, master in masters[0].items())


def test_they_are_rounded_and_cut_into_files_if_asked(saved, tmp_path, capsys):
    folder, masters = saved
    status, _ = export(capsys, folder, tmp_path / "out", "--dtype", "bfloat16", "--max-shard", "100B")
    assert status == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    for file in files:
        data = file.read_bytes()
        for name, stored in read_header(file).items():
            values = np.frombuffer(data, stored.dtype, int(np.prod(stored.shape)), stored.offset)
            expected = {**masters[1], "frozen": FROZEN}.get(name, COUNT).reshape(-1)
            if expected.dtype == np.float32:
                with np.errstate(all="ignore"):
                    expected = expected.astype(ml_dtypes.bfloat16)
            assert values.tobytes() == expected.tobytes(), name


def test_what_is_trained_alone(saved):
    folder, masters = saved
    weights = SavedWeights(folder, frozen=False).weights
    assert {weight.name for weight in weights} == masters[1].keys()
    assert weights[0].read(False) is None


@pytest.mark.parametrize("file", ["shard-00000-of-00001.safetensors", "manifest.json"])
def test_damage_is_one_error_and_earlier_weights_stay(saved, tmp_path, capsys, file):
    folder, _ = saved
    out = tmp_path / "out"
    assert export(capsys, folder / "step-00000001", out)[0] == 0
    before = (out / "model.safetensors").read_bytes()
    path = folder / "step-00000002" / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    status, said = export(capsys, folder, out)
    assert status == 2
    assert str(path) in said.err
    assert "Traceback" not in said.err
    assert [each.name for each in out.iterdir()] == ["model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "out"], "no checkpoint"),
        (["saved", "saved/latest"], "cannot be written"),
        (["saved", "out", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["saved", "out", "--max-shard", "5"], "expected a size such as 32GB"),
        (["saved"], "required: folder"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_one_line(saved, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(saved[0].parent)
    try:
        status = main(["export", *arguments])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert status == 2
    assert words in said.err
    assert len(said.err.splitlines()) == 1


def test_frozen_tensors_that_were_not_saved_are_counted(tmp_path, capsys):
    subject = make(stage=1)
    one_step(subject)
    save(subject, tmp_path / "saved", left_out={"base": (2, 3)})
    status, said = export(capsys, tmp_path / "saved", tmp_path / "out")
    assert status == 0
    assert said.out.endswith("\n  frozen tensors that the checkpoint does not hold, as with frozen=False: 1\n")
