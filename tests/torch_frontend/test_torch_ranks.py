"""Real processes over gloo: exact against DistributedDataParallel, and what happens when a rank is lost."""

import json
import os
import re
import subprocess
import sys

import pytest

from offload_core.ranks.consistency import FORMAT, VERSION
from tests.support.processes import ROOT, run


def test_two_ranks_equal_ddp_with_fused_adamw_bit_for_bit(tmp_path):
    first, second = run("against_ddp", 2, tmp_path)
    assert first["ours"] == first["theirs"] == second["ours"]


def test_four_ranks_agree_and_so_do_the_stages(tmp_path):
    results = run("stages", 4, tmp_path)
    assert len({json.dumps(stage) for result in results for stage in result.values()}) == 1


def test_buckets_that_stay_on_the_device_give_the_same_bits(tmp_path):
    results = run("on_devices", 3, tmp_path)
    assert all(result == results[0] for result in results)
    assert results[0]["device ordered"] == results[0]["host ordered"]
    assert results[0]["device native"] == results[0]["host native"]
    assert results[0]["host native"][0] != results[0]["host ordered"][0]  # summed in bfloat16


def test_scripted_layers_read_finished_weights(tmp_path):
    for result in run("scripted", 2, tmp_path):
        assert result["overlap"] == result["serial"] == result["plain"]


def test_an_exchange_keeps_nothing_beside_the_compiler(tmp_path):
    first, second = run("beside_the_compiler", 2, tmp_path)
    assert first == second
    assert first["refused"] == 3


def test_a_narrow_communication_dtype_rounds_what_travels(tmp_path):
    for result in run("narrow", 2, tmp_path):
        assert result["travelling"][0] == result["rounded"][0]
        numel, steps = 7_312, 3
        assert result["travelling"][1] == pytest.approx(steps * numel * (2 + 4) / 2, rel=0.01)
        assert result["rounded"][1] == pytest.approx(steps * numel * (4 + 4) / 2, rel=0.01)


def test_no_sync_defers_the_reduction_to_the_boundary_as_ddp_does(tmp_path):
    first, second = run("no_sync", 2, tmp_path)
    assert first["ours"] == first["theirs"] == second["ours"]
    sent = first["sent"]
    assert sent[0] == sent[2] == 0  # nothing but at the boundaries
    assert sent[3] == sent[6] > 0
    assert sent[7] == sent[10] == 2 * sent[3]
    assert sent[11] == 3 * sent[3]


def test_deferred_gradients_join_those_that_have_left_or_are_discarded_with_them(tmp_path):
    first, second = run("no_sync_in_between", 2, tmp_path)
    assert first["ours"] == first["by hand"] == second["ours"]


def test_a_parameter_that_one_rank_alone_uses_is_updated_on_all(tmp_path):
    for result in run("unused_on_a_rank", 2, tmp_path):
        assert all(result.values()), result


def test_each_rank_resumes_its_part(tmp_path):
    results = run("state_dicts", 2, tmp_path)
    assert len({value for result in results for value in result.values()}) == 1


def test_one_rank_alone_may_ask_for_its_state_dict(tmp_path):
    first, second = run("state_dict_of_one_rank", 2, tmp_path)
    assert first["asked"] == first["not asked"] == second["asked"] == second["not asked"]


def test_buckets_that_are_launched_after_backward_are_sent_early_too(tmp_path):
    for result in run("sent_early_beside_unused", 2, tmp_path):
        for late, early in result.values():
            assert late == early


def test_a_nan_on_one_rank_makes_all_skip(tmp_path):
    assert run("nan", 3, tmp_path) == [{"skipped": "overflow", "unchanged": True}] * 3


def test_a_killed_rank_is_an_error_on_the_others_within_the_timeout(tmp_path):
    results = run("killed", 3, tmp_path)
    assert results[1] is None
    for survivor in (results[0], results[2]):
        assert "exchange of gradients failed" in survivor["error"]
        assert "bucket" in survivor["error"]
        assert survivor["unchanged"]


def test_after_a_rank_was_lost_in_mid_update_nothing_half_done_is_to_be_had(tmp_path):
    results = run("killed_in_gather", 3, tmp_path)
    assert results[1] is None
    for survivor in (results[0], results[2]):
        first, *others = survivor["said"]
        assert re.match(r"CollectiveError: .*bucket 2: gathering of parameters failed", first)
        assert len(others) == 3
        assert all(re.match("StateError: the last update broke off .*last checkpoint", said) for said in others)


def test_settings_that_differ_are_refused_on_every_rank(tmp_path):
    first, second = run("differing_settings", 2, tmp_path)
    for result in (first, second):
        assert all(result["said"].values())
    assert "(4) * gradient_accumulation_steps (6) * ranks (2) = 48" in second["said"]["batch"]
    assert "lr is 0.0001 here and differs from rank 0's" in second["said"]["lr"]
    assert "loss_scale is 1 here" in second["said"]["loss_scale"]
    for name, values in {
        "schedule": ("'overlap'", "'delayed'"), "delay_warmup_steps": (0, 1), "update_in_backward": (False, True),
        "stage": (2, 3), "threshold": (100, 10**6), "threshold of init": (100, 10**6),
    }.items():  # fmt: skip
        setting = "param_persistence_threshold" if name.startswith("threshold") else name
        expected = "expected the same model and configuration on every rank"
        error = f"ParameterError: {setting} is {values[0]} here and differs on another rank; {expected}"
        assert first["said"][name] == error
        assert (
            second["said"][name]
            == f"ParameterError: {setting} is {values[1]} here and differs from rank 0's; {expected}"
        )
    for name, of_rank_1 in {
        "VERSION": f"9.9.9 (messages of format {FORMAT})", "FORMAT": f"{VERSION} (messages of format {FORMAT + 1})"
    }.items():  # fmt: skip
        for result in (first, second):
            assert result["said"][name] == (
                f"ConfigError: ranks run different versions: rank 0 has offload-core {VERSION} (messages of format "
                f"{FORMAT}), rank 1 has offload-core {of_rank_1}; expected one version on every rank: install the same "
                "offload-core wherever a rank runs"
            )
    assert "'weight' ([32, 64], 2048 elements" in second["said"]["shape"]
    assert "in memory order [0, 2, 3, 1]" in second["said"]["order"]
    assert "ranks differ in what they update with; here: [AdamHyper(lr=0.0001" in second["said"]["lr at a step"]
    assert first["bits"] == second["bits"]


def test_frozen_parameters_start_alike_and_are_unfrozen_together(tmp_path):
    first, second = run("frozen_and_unfrozen", 2, tmp_path)
    assert first == second
    assert first["first"] != first["last"]


def test_states_of_another_rank_are_refused_and_whole_ones_are_cut(tmp_path):
    for rank, result in enumerate(run("others_states", 2, tmp_path)):
        assert result["said"].startswith(f"load_state_dict: the states of rank {1 - rank} of 2, expected those of rank")
        assert result["ours"] == result["theirs"]


def test_a_rank_that_runs_out_of_batches_is_a_clear_timeout_on_the_others(tmp_path):
    results = run("out_of_batches", 2, tmp_path)
    assert "bucket 0: exchange of gradients failed" in results[0]["error"]
    assert "did not come in the group's time" in results[0]["error"]
    assert results[0]["unchanged"]


def test_ranks_whose_models_differ_are_told_which_parameter(tmp_path):
    first, second = run("differing", 2, tmp_path)
    assert first["error"].startswith("ParameterError")
    assert "'2.weight'" in second["error"]


@pytest.mark.parametrize("nproc", [2])
def test_torchrun_finds_the_group_by_itself(nproc, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from frontends.torch import wrap\n"
        "dist.init_process_group('gloo')\n"
        "engine = wrap(torch.nn.Linear(16, 16))\n"
        "engine.backward(engine(torch.ones(2, 16)).sum())\n"
        "assert engine.step().updated\n"
        "held = sum(t.numel() for s in engine.optimizer.state.values() for k, t in s.items() if k == 'exp_avg')\n"
        "assert held < 272, held\n"
        "dist.destroy_process_group()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
