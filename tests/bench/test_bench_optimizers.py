"""The search for a rate, and the runs of ``bench.optimizers`` on a model that takes seconds."""

import json
import math

import pytest

from bench import optimizers
from bench.train.presets import OPTIMIZERS


@pytest.mark.parametrize(("best", "first"), [(1e-2, 1e-3), (3e-4, 1e-2), (3e-3, 3e-3)])
def test_the_search_ends_at_a_rate_between_two_that_are_worse(best, first):
    tried = optimizers.search(first, lambda rate: abs(math.log10(rate / best)))
    rates = list(tried)
    at = rates.index(best)
    assert min(tried, key=tried.get) == best
    assert 0 < at < len(rates) - 1
    assert rates == sorted(rates)


def test_the_search_ends_where_every_larger_rate_is_better():
    assert len(optimizers.search(1e-3, lambda rate: -rate)) == optimizers.MOST


def test_every_optimizer_has_a_first_rate():
    assert optimizers.FIRST.keys() == OPTIMIZERS.keys()


def test_rates_are_1_or_3_times_a_power_of_ten():
    assert [optimizers.near(3e-3, i) for i in (-2, -1, 0, 1, 2)] == [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]


@pytest.mark.slow
def test_every_optimizer_trains_at_the_best_rate_of_its_search(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(optimizers, "RESULTS", tmp_path / "optimizers.jsonl")
    monkeypatch.setattr(optimizers, "PICTURE", tmp_path / "optimizers.svg")
    monkeypatch.setattr(optimizers, "MOST", 2)
    monkeypatch.setattr(optimizers, "OPTIMIZERS", {name: OPTIMIZERS[name] for name in ("adamw", "muon")})
    small = "--train=--micro-batch 2 --context 32 --eval-batches 2 --warmup 2"
    optimizers.main(["--seeds", "2", "--steps", "10", "--write", small])
    [record] = [json.loads(line) for line in optimizers.RESULTS.read_text().splitlines()]
    assert list(record["loss"]) == ["adamw", "muon"]
    for optimizer, losses in record["loss"].items():
        tried = record["search"][optimizer]
        assert tried[str(float(record["rates"][optimizer]))] == min(tried.values())
        assert len(set(losses)) == 2
    assert "standard deviation" in capsys.readouterr().out
    assert (tmp_path / "optimizers.svg").stat().st_size > 1000
