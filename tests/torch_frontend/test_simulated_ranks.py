"""Ranks that exchange buckets between simulated devices, by a group that is as late as nccl."""

import re

import pytest

from frontends.torch import wrap
from offload_core.device.trace import TO_HOST, UPDATE
from tests.support import simulated
from tests.support.processes import run
from tests.support.torch_rank import batch, make, whole_bits
from tests.support.traces import read
from tests.support.wait_mutants import NoticedBy, by_name, mutants_of

pytestmark = pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")


def test_ranks_on_devices_give_the_bits_of_ranks_on_the_host(tmp_path):
    simulated.prepare()
    results = run("everywhere", 2, tmp_path, "simulated_worker.py")
    for name in results[0]:
        host, *late = [found for result in results for found in result[name][:1]] + [
            found for result in results for found in result[name][1:]
        ]
        expected = results[0][name][0]
        assert host == results[1][name][0]
        for bits, norms, kind in late[1:]:
            assert (bits, norms) == (expected[0], expected[1]), name
            assert kind == "DeviceRanks", name


@pytest.mark.slow
def test_ranks_on_devices_run_other_experts_of_leaf_modules_and_have_the_bits_of_stage_2_on_the_host(tmp_path):
    simulated.prepare()
    first, second = run("mixtures", 2, tmp_path, "simulated_worker.py")
    assert first == second
    assert len(set(first)) == 1


def test_what_two_ranks_on_devices_saved_one_on_the_host_resumes_to_the_same_bits(tmp_path):
    simulated.prepare()
    expected, other = run("saved", 2, tmp_path, "simulated_worker.py")
    assert expected == other
    for name, fields in (("stage 2", {"gradient_clipping": 0.05}), ("streamed", {"param_dtype": "bfloat16"})):
        engine = wrap(make(seed=1), lr=1e-2, **fields)
        engine.load_checkpoint(tmp_path / "checkpoints" / name)
        for seed in range(3, 6):
            engine.backward(engine(batch(seed, 0)).float().pow(2).mean())
            engine.step()
        assert whole_bits(engine) == expected[name], name


def test_models_that_ranks_build_in_shards_on_their_devices_are_those_built_whole_and_each_rank_has_its_trace(tmp_path):
    simulated.prepare()
    first, second = run("built", 2, tmp_path, "simulated_worker.py")
    for name, ((whole, held), (in_shards, nothing)) in first.items():
        assert whole == in_shards == second[name][0][0] == second[name][1][0]
        assert held > nothing == 0
        for rank in range(2):
            spans = read(tmp_path / f"{name}, 2.rank{rank}.json")
            assert {s["pid"] for s in spans} == {rank}
            updates = [s["args"]["bucket"] for s in spans if s["cat"] == UPDATE]
            arrived = [s["args"]["bucket"] for s in spans if s["cat"] == TO_HOST]
            assert sorted(arrived) == [*range(len(arrived))]
            assert sorted(updates) == sorted({*updates} & {*arrived}) != []  # a shard may be empty


@pytest.mark.parametrize("group", ["gloo", "late"])
def test_a_copy_to_one_ranks_device_that_fails_ends_the_engines_of_all_within_the_groups_time(group, tmp_path):
    simulated.prepare()
    first, second = run(f"failing, {group}", 2, tmp_path, "simulated_worker.py")
    expected = first.pop("expected")
    assert second.pop("expected") == expected
    assert first.pop("seconds") == second.pop("seconds") == 7.0
    for name, (said, _) in second.items():
        assert said[0] == "RuntimeError: simulated device: the copy failed, as asked", name
        assert said[1] is None  # zero_grad
        assert all(re.match("(Collective|State)Error", step) for step in said[2:4]), name
    for name, (said, _) in first.items():
        assert said[0] is None or re.match("(Collective|Runtime)Error", said[0]), name
        assert all(re.match("(Collective|State)Error", step) for step in said[2:4]), name
    if group == "gloo":  # the last bucket was there, on this rank: the step is whole
        assert first["stage 1"][0][0] is None
        assert first["stage 1"][1] == expected != second["stage 1"][1]
        for said, _ in second.values():
            assert said[2].startswith("StateError: the last update broke off on this rank alone (simulated device: the")
            assert said[5] is None  # its states can be read


@pytest.mark.slow
def test_an_exchange_that_is_not_waited_for_shows(tmp_path):
    simulated.prepare()
    for result in run("without_waits", 2, tmp_path, "simulated_worker.py"):
        assert result["lost"] != result["expected"]


RANKS = "frontends.torch.ranks.device_ranks"
UNNOTICED = {
    f"{RANKS}._Agreed.order: self._event.order()": "the host alone waits for gradients that arrive",
    f"{RANKS}.DeviceRanks._publish: copies of lane.event(copies)": "the model has them, and readers wait for them",
    f"{RANKS}.DeviceRanks._gather: whole of lane.event(whole)": "its storage is freed after what waited for it",
}
"""Of what orders an exchange between devices, what no scenario misses, and why."""
NOTICED_BY = NoticedBy("ranks")


def test_no_mutant_was_dropped_and_the_table_says_what_notices_each():
    mutants = {*by_name(mutants_of(RANKS))}
    assert {*UNNOTICED} <= mutants
    NOTICED_BY.assert_names(mutants - {*UNNOTICED})


@pytest.mark.slow
def test_every_wait_of_an_exchange_between_devices_that_is_taken_out_is_noticed(tmp_path):
    simulated.prepare()
    first, second = run("mutants", 2, tmp_path, "simulated_worker.py")
    assert all(first.pop("sound") + second.pop("sound"))
    assert first == second
    assert {mutant for mutant, by in first.items() if by is None} == {*UNNOTICED}
    for mutant in {*first} - {*UNNOTICED}:
        NOTICED_BY.assert_noticed(mutant, first[mutant])
