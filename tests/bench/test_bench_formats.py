"""The curves of ``bench.formats``, on a model that takes seconds."""

import json

import pytest

from bench import formats

pytestmark = pytest.mark.slow


def test_curves_are_of_the_same_data_in_each_format(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(formats, "RESULTS", tmp_path / "formats.jsonl")
    monkeypatch.setattr(formats, "PICTURES", tmp_path)
    small = "--train=--preset tiny --steps 20 --micro-batch 2 --context 32 --eval-batches 2"
    formats.main(["--only", "curves", "--seeds", "2", "--write", small])
    printed = capsys.readouterr().out
    [record] = [json.loads(line) for line in formats.RESULTS.read_text().splitlines()]
    assert set(record["curves"]) == set(formats.IN_CURVES)
    for seed in range(2):
        fp32, narrow = (record["curves"][name][seed] for name in formats.IN_CURVES)
        assert len(fp32["training"]) == len(narrow["training"]) == 20
        assert fp32["training"][0] == narrow["training"][0], "before the first update"
        assert fp32["training"] != narrow["training"]
        assert f"{fp32['held_out']:.4f}" in printed
    assert (tmp_path / "formats-curves.svg").stat().st_size > 1000
    assert not (tmp_path / "formats.svg").exists()
