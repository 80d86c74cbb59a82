"""The group that an engine owns: it ends with the engine, is final once the program's group is gone, and says who was
not there."""

import re

from tests.support.processes import run


def worker(scenario, folder, world_size=2):
    return run(scenario, world_size, folder, "own_group_worker.py")


def test_an_update_ends_after_its_process_group_was_destroyed_and_none_begins(tmp_path):
    for rank, result in enumerate(worker("destroyed", tmp_path)):
        gone = (
            f"CollectiveError: rank {rank}: bucket 0: exchange of gradients: the process group of this engine was "
            "destroyed, and the engine ends with it; expected destroy_process_group() after the last step: wrap the "
            "model anew in a new group. Its parameters are those of the last step"
        )
        for said in (result["gone"], result["in another group"]):
            assert re.sub(r"bucket \d", "bucket 0", said) == gone
        assert result["ended"]
        assert result["unchanged"]
        assert result["close"] is None
        assert result["anew"] is None


def test_where_the_process_group_carries_buckets_its_end_is_final_also_after_another_was_made(tmp_path):
    for rank, (first, second) in enumerate(worker("destroyed_between_devices", tmp_path)):
        assert first.startswith(f"CollectiveError: rank {rank}: bucket ")
        assert "the process group of this engine was destroyed" in first
        assert second.startswith("StateError: the last update broke off")


def test_engines_leave_no_descriptors_and_no_threads(tmp_path):
    for result in worker("ended", tmp_path):
        assert list(result) == ["closed, stage 2", "closed, stage 3", "dropped"]
        for before, after in result.values():
            assert after[0] <= before[0], result
            assert after[1] <= before[1], result


def test_headers_go_through_gloo_where_ranks_cannot_reach_each_other(tmp_path):
    for rank, (same, said) in enumerate(worker("unreachable", tmp_path)):
        assert same
        assert f"rank {rank}" in said
        assert "ranks went different ways" in said or "failed" in said


def test_an_engine_beyond_the_limit_of_descriptors_is_refused_by_name(tmp_path):
    for rank, (refused, afterwards) in enumerate(worker("few_descriptors", tmp_path)):
        assert refused.startswith(f"CollectiveError: rank {rank}: an engine of 2 ranks takes up to 20 file descriptors")
        assert "close() engines that are no longer used, or raise the limit (ulimit -n)" in refused
        assert afterwards is None


def test_a_rank_that_comes_to_wrap_too_late_is_told_so_and_the_others_whom_they_missed(tmp_path):
    first, second = worker("late", tmp_path)
    assert first.startswith("CollectiveError: rank 0: making a group of the engine's ranks failed (")
    assert "; missing: rank 1; a rank was lost, did not come in the group's time, or" in first
    failed = "rank 1: making a group of the engine's ranks failed (rank 0 has given up waiting)"
    assert second.startswith(f"CollectiveError: {failed}; a rank was lost")


def test_a_lost_rank_is_the_same_error_each_time(tmp_path):
    said, _ = worker("lost", tmp_path)
    assert said[0].startswith("CollectiveError: rank 0: bucket 0: exchange of gradients failed (")
    assert said == 3 * said[:1]


def test_ranks_that_went_different_ways_all_get_one_error_before_data_of_equal_or_other_size_are_paired(tmp_path):
    first, second = worker("astray", tmp_path)
    assert first == second
    place = "at parameter '{}.weight': gathering of its shards (1,024 bytes)"
    error = "CollectiveError: ranks went different ways: rank 0 {}; rank 1 {}; expected the same on every rank: "
    assert first[0].startswith(error.format(place.format(0), place.format(1)))
    assert re.match(error.format("at gradient norm .*", "at bucket .: exchange of gradients .*"), first[1])


def test_a_group_of_one_rank_needs_no_connections(tmp_path):
    assert worker("alone", tmp_path, 1) == [[0, "SingleRank"]]
