"""``python -m offload_core inspect``: what it shows of checkpoints, whole and damaged."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from offload_core.__main__ import main
from offload_core.checkpoint.shard_writer import Source
from offload_core.layout.regions import Region
from offload_core.support.checkpoint_folder import MANIFEST
from tests.support.checkpoints import one_step, save
from tests.support.pipelines import make


@pytest.fixture
def folder(tmp_path):
    subject, frozen = make(stage=1), np.zeros((2, 3), np.float32)
    for step in (1, 2):
        one_step(subject)
        save(
            subject,
            tmp_path,
            step=step,
            state={"table": np.arange(3)},
            sources=[Source.of("frozen", "param", Region((2, 3), 0, 6), frozen)],
            shapes={"frozen": (frozen.shape, frozen.dtype)},
            front_end="torch",
        )
    return tmp_path


def inspect(capsys, *arguments):
    status = main(["inspect", *map(str, arguments)])
    return status, capsys.readouterr().out


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_is_shown_and_checked(folder, capsys):
    path = folder / "step-00000002"
    status, out = inspect(capsys, path, "--json")
    shown = json.loads(out)
    assert status == 0
    assert (shown["path"], shown["step"], shown["errors"]) == (str(path), 2, [])
    [file] = shown["files"]
    assert file["bytes"] == shown["bytes"] == (path / file["file"]).stat().st_size
    assert shown["parameters"]["p1"] == {
        "shape": [100],
        "dtype": "bfloat16",
        "trained": True,
        "step": 2,
        "group": 0,
        "behind": False,
    }
    assert shown["parameters"]["frozen"] == {"shape": [2, 3], "dtype": "float32", "trained": False}
    written = shown["written"]
    assert (written["front_end"], written["stage"], written["world_size"]) == ("torch", 1, 1)
    assert written["config"]["lr"] == 1e-3
    assert datetime.fromisoformat(written["date"]).tzinfo is not None
    status, out = inspect(capsys, path)
    assert status == 0
    for expected in ("step 2", "by torch", "140 trained elements of bfloat16", "p1 ", "frozen", file["file"]):
        assert expected in out
    assert out.endswith("every block is as it was written\n")


def test_a_folder_of_several_is_listed(folder, capsys):
    status, out = inspect(capsys, folder)
    one, two = out.splitlines()
    assert status == 0
    assert one.startswith("step-00000001  step 1")
    assert one.endswith("whole")
    assert two.endswith("whole  <- latest")
    status, out = inspect(capsys, folder, "--json")
    assert status == 0
    assert json.loads(out)["latest"] == "step-00000002"
    assert [one["step"] for one in json.loads(out)["checkpoints"]] == [1, 2]


@pytest.mark.draws(2)
@pytest.mark.parametrize("where", ["", "step-00000001"])
@pytest.mark.parametrize("file", ["shard-00000-of-00001.safetensors", "manifest.json"])
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_damage_is_named(folder, capsys, where, file, form):
    path = folder / "step-00000001" / file
    damage(path)
    status, out = inspect(capsys, folder / where, *form)
    assert status == 1
    assert str(path) in out
    assert inspect(capsys, folder / "step-00000002")[0] == 0


def test_a_latest_that_leads_nowhere_is_named(folder, capsys):
    (folder / "latest").write_text("step-00000007")
    status, out = inspect(capsys, folder)
    assert status == 1
    assert f"{folder / 'latest'} names 'step-00000007'" in out
    assert "step-00000002  step 2" in out


def test_a_folder_without_any_is_an_error(tmp_path, capsys):
    status, out = inspect(capsys, tmp_path)
    assert (status, "no checkpoint" in out) == (1, True)
    status, out = inspect(capsys, tmp_path / "missing", "--json")
    assert (status, "no checkpoint" in json.loads(out)["errors"][0]) == (1, True)


def test_as_a_program(folder):
    command = [sys.executable, "-m", "offload_core", "inspect", folder]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2


def test_a_name_that_no_encoding_can_write_is_shown(tmp_path):
    """A path may hold any bytes, and a manifest half of a character."""
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    command = [sys.executable, "-m", "offload_core", "inspect", str(folder)]
    done = subprocess.run(command, capture_output=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 1
    assert b"caf\\udce9: no checkpoint" in done.stdout


def test_a_checkpoint_of_a_newer_format_is_not_called_damaged(folder, capsys):
    manifest = folder / "step-00000002" / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 9}))
    status, said = inspect(capsys, folder)
    assert status == 1
    assert "step-00000002  of a newer format, not checked" in said
    assert "expected a newer offload-core" in said
    assert "damaged" not in said
