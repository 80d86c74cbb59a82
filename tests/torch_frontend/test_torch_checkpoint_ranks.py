"""Resuming in new processes, in as many ranks as before or fewer, is invisible."""

import pytest

from tests.support.processes import run


@pytest.mark.slow
def test_thirty_steps_are_ten_saved_and_twenty_by_as_many_ranks_or_fewer(tmp_path):
    def ranks(scenario, world_size):
        folder = tmp_path / f"{scenario} {world_size}"
        folder.mkdir()
        results = run(scenario, world_size, folder, "checkpoint_worker.py")
        assert all(result == results[0] for result in results)
        return results[0]

    straight = ranks("straight", 4)
    assert len(straight) == 15
    assert (
        straight["1, float16"]
        == straight["2, float16"]
        == straight["3, float16"]
        == straight["3 in host memory, float16"]
    )
    for world_size in (4, 2, 1):
        resumed = ranks("resumed", world_size)
        for case, bits in straight.items():
            assert resumed[case] == bits, f"{case}: {world_size} ranks"


def test_what_one_rank_cannot_save_none_does_and_gradients_that_were_not_sent_count(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    first, second = run("refused", 2, folder, "checkpoint_worker.py")
    assert first[0] == "CheckpointError: save of a checkpoint failed in process 1, a"
    assert second[0] == "ValueError: not here"
    waiting = "StateError: a checkpoint is asked for between backward() and"
    assert first[1:] == second[1:] == [waiting, waiting]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == ["step-00000000"]


def test_all_ranks_save_after_the_step_in_which_one_had_a_signal(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    results = run("signalled", 2, folder, "checkpoint_worker.py")
    saved = [[2, "step-00000002"], [5, "step-00000005"]]
    assert results == [{"saved": saved, "last": {"update": 5}, "after": True}] * 2
