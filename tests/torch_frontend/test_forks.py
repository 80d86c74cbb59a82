"""Forks of a process that trains and saves: nothing in them hangs, and nothing of the parent's is kept."""

import json

from tests.support.processes import ROOT, torch_server


def run(scenario, folder):
    [done] = torch_server().run([str(ROOT / "tests" / "workers" / "fork_worker.py"), scenario, str(folder)])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_child_that_reads_a_parameter_whose_update_is_on_its_way_gets_an_error(tmp_path):
    result = run("pending", tmp_path)
    assert len(result["on its way"]) == 3
    for said in result["on its way"]:
        assert said.startswith("StateError: this process was forked, and the background thread")
    assert result["ended"] == [result["here"]]


def test_a_child_of_another_thread_does_not_read_the_middle_of_a_step(tmp_path):
    result = run("torn", tmp_path)
    [said] = result["said"]
    assert said.startswith("StateError: this process was forked while another thread was in the middle of step()")
    assert result["updates"] == 1


def test_a_child_that_outlives_its_parent_does_not_keep_the_checkpoints_lock(tmp_path):
    assert run("lock", tmp_path) == {"saved": "step-00000000"}


def test_a_child_leaves_its_parents_save_alone(tmp_path):
    assert run("unfinished", tmp_path) == {"said": ["True", "None"], "updates": 0}


def test_a_child_of_another_thread_trains_although_the_main_thread_was_in_a_section(tmp_path):
    assert run("section", tmp_path) == [True, [False]]


def test_a_child_of_a_process_that_saves_reads_its_states(tmp_path):
    assert run("saving", tmp_path) == [1.0]
