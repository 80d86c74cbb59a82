"""Stage 3 over real processes: the bits of stage 2 and of DistributedDataParallel, from shards."""

import pytest

from tests.support.processes import run

pytestmark = pytest.mark.slow


def worker(scenario, folder):
    return run(scenario, 2, folder, "partitioned_worker.py")


def test_three_models_train_as_in_stage_2_and_as_under_ddp_with_fused_adamw(tmp_path):
    """A GPT with tied embeddings, the three kinds of external parameters, and a Llama of Hugging Face's."""
    first, second = worker("against_ddp", tmp_path)
    assert first == second
    assert list(first) == ["gpt", "external", "llama"]
    for name, found in first.items():
        assert len(found) >= 3
        assert len(set(found.values())) == 1, (name, found)


def test_every_way_to_hold_and_gather_shards_gives_the_same_bits(tmp_path):
    first, second = worker("ways", tmp_path)
    assert first["bits"] == second["bits"]
    assert len(set(first["bits"].values())) == 1, first
    for result in (first, second):
        memory = result["memory"]
        assert memory["of"] / 2 <= memory["bytes"] <= memory["of"] / 2 * 1.05  # nothing but this rank's half
        # The root's embedding, and the two modules that are whole where a checkpointed one is computed again.
        assert 0 < memory["peak"] <= 64 * 32 + 2 * (32 * 128 + 128) < memory["of"] / 2


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    return worker("changes", tmp_path_factory.mktemp("changes"))


def test_one_rank_changes_parameters_for_all_and_masters_follow(changes):
    first, second = changes
    assert first["stage 2"] == first["stage 3"] == second["stage 3"]


def test_ranks_that_run_other_modules_of_equal_size_get_one_error_instead_of_mixed_layers(changes):
    for result in changes:
        assert result["other order"] == 2 * [
            "ranks went different ways: rank 0 at parameter 'parts.0.weight': gathering of its shards (1,024 bytes); "
            "rank 1 at parameter 'parts.1.weight': gathering of its shards (1,024 bytes); expected the same on every "
            "rank: equally many backwards and steps, in stage 3 the same modules in the same order: end this run and "
            "resume from the last checkpoint"
        ]


def test_ranks_run_other_experts_of_a_leaf_module_and_are_told_of_each_other_without(tmp_path):
    first, second = worker("experts", tmp_path)
    for name in ("plain", "blocks again", "experts again"):
        expected, ours = first["runs"][f"{name}, stage 2"], first["runs"][f"{name}, leaves"]
        theirs = second["runs"][f"{name}, leaves"]
        assert ours["bits"] == theirs["bits"] == expected["bits"]
        assert ours["routed"] != theirs["routed"], "the ranks' tokens went to the same experts"
    for result in (first, second):
        assert "ranks went different ways" in result["said"]


def test_a_gradient_that_one_rank_lacks_is_no_matter_in_a_leaf_module_and_an_error_that_names_it_elsewhere(tmp_path):
    """It comes when the group's time is over: each rank waits in another exchange."""
    for result in worker("lacking", tmp_path):
        assert result["leaf"] == result["stage 2"]
        assert "none" not in result
        assert "exchange of gradients" in result["said"]
        assert "(in stage 3: ran other modules or lacked a gradient; leaf_modules names modules" in result["said"]


def test_ranks_generate_to_other_lengths_with_synced_gpus_and_are_told_of_each_other_without(tmp_path):
    first, second = worker("generates", tmp_path)
    assert first["lengths"] == [7, 7]
    assert second["lengths"] == [12]
    for result in (first, second):  # rank 1 makes another token, while rank 0 trains on
        assert "parameter 'model.embed_tokens.weight': gathering of its shards" in result["said"]
        assert "rank 0 " in result["said"].replace("rank 0:", "rank 0 ")
        assert "rank 1 " in result["said"].replace("rank 1:", "rank 1 ")


def test_a_rank_that_is_lost_in_forward_is_an_error_that_names_what_was_gathered(tmp_path):
    survivor, lost = worker("killed", tmp_path)
    assert lost is None
    assert "parameter 'blocks." in survivor["said"]
    assert "gathering of its shards failed" in survivor["said"]
    assert survivor["live"] == 0
