"""Settings of the whole suite.

All random draws come from one seed: ``pytest --seed 7``, or ``make test ARGS="--seed 7"``. A run prints it at its end.
"""

import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Two files of tests at a time share the processors, where threads that spin while they wait cost the other half its
# time: interrupts of torch steps took 40 s and take 22. OpenMP reads it when torch is imported, here and in children.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell starts what runs in the background with interrupts ignored; tests send them, to their own children, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine may be as slow as it likes: time decides no test. Without a database, one run cannot change the next.
settings.register_profile("suite", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

OPTIONAL = {
    "torch",
    "jax",
    "optax",
    "safetensors",
    "flax",
    "equinox",
    "orbax",
    "transformers",
    "accelerate",
    "trl",
    "peft",
    "datasets",
    "ray",
    "torchtitan",
}
"""Without one of these, the tests that need it are skipped: so the rest runs on a Python for which it has no wheel."""
LONGEST = (
    "torch_frontend/test_compiled_blocks.py",
    "jax_frontend/mesh/test_bits.py",
    "jax_frontend/mesh/test_placements.py",
    "integrations/test_offload_trainer.py",
    "integrations/test_jax_integrations.py",
    "torch_frontend/test_torch_overlap.py",
    "jax_frontend/test_jax.py",
    "packaging/test_docs.py",
    "mutation/test_device_waits.py",
    "jax_frontend/mesh/test_states.py",
    "jax_frontend/mesh/test_differentiation.py",
    "torch_frontend/test_partitioned.py",
)
"""Files that take the longest. They begin first, so that no process is left alone with one of them at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of every random draw in the tests; default: 0")
    stores = ["memory", "late", "disk", "nvme", "half nvme"]
    words = "that keeps the states; nvme: on disk, and parameters that stage 3 has on the host, too"
    parser.addoption("--store", choices=stores, default="memory", help=words)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hand the seed to Hypothesis, whose own option wins, and to the order of sets in all processes that start now."""
    seed = config.getoption("seed")
    if (store := config.getoption("store")) != "memory":
        from tests.support import late_stores

        late_stores.take_the_place_of_memory(store)
    if config.getoption("hypothesis_seed", 0) is None:  # a pair of processes has no plugins
        config.option.hypothesis_seed = seed
    os.environ.setdefault("PYTHONHASHSEED", str(seed % 2**32))


NEEDED_BYTES = 2 << 30
"""Of free space for temporary files: several runs of ranks and their checkpoints at a time."""


def pytest_sessionstart() -> None:
    folder = tempfile.gettempdir()
    if (free := shutil.disk_usage(folder).free) < NEEDED_BYTES:
        pytest.exit(
            f"{folder} has {free >> 20} MiB free and the tests need {NEEDED_BYTES >> 20}: make room, or name another "
            "folder: TMPDIR=/path make test",
            returncode=1,
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(f"random draws: --seed {config.getoption('seed')}")


_file: Path | None = None
"""The file of the last test."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test, and what its fixtures make, draws the same whether it runs alone or after others."""
    global _file
    if item.config.getoption("store") != "memory" and any(item.iter_markers("states_in_memory")):
        pytest.skip("of states in memory")
    if item.path != _file:
        _file = item.path
        collect_garbage_of_others()
    seed = item.config.getoption("seed")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


@pytest.fixture
def exact_rsqrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """``optax.adagrad``'s rsqrt rounds as its definition. XLA's own approximates it, by the processor's instructions,
    unless XLA_FLAGS has ``--xla_cpu_enable_platform_dependent_math=false``."""
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(jax.lax, "rsqrt", lambda x: 1 / jax.numpy.sqrt(x))


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """XLA compiles equal programs of different tests once: compiling is most of these tests' time."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def code_of_other_tests_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for the rest of a process once compiled code was given a parameter in mid-update."""
    if (pending := sys.modules.get("frontends.torch.pending")) is not None:
        monkeypatch.setattr(pending, "compiled_code_reads", False)


@pytest.fixture(autouse=True)
def store(request: pytest.FixtureRequest) -> Iterator[None]:
    """As a parameter "late", "disk" or "nvme", it keeps the states of this test's pipelines in such a store."""
    if (name := getattr(request, "param", "memory")) == "memory":
        yield
        return
    from tests.support import late_stores

    with late_stores.late(name):
        yield


def needs_accelerator(item: pytest.Item) -> bool:
    device = getattr(item, "callspec", None) and item.callspec.params.get("device")
    return "accelerator" in getattr(item, "fixturenames", ()) or str(device).startswith("simulated")


SAMPLED = {
    "test_one_call_that_fails_is_one_error_at_most_and_changes_no_bit": 4,
    "test_a_disk_that_goes_on_failing_breaks_the_training_until_a_checkpoint_is_loaded": 3,
    "test_a_call_that_comes_back_short_is_gone_on_with_or_is_an_error": 3,
    "test_twelve_steps_equal_those_in_place": 3,
    "test_updating_in_backward_gives_the_same_bits": 4,
    "test_thirty_steps_are_ten_saved_and_twenty_by_as_many_ranks_or_fewer": 1,
    "test_training_compiles_the_graphs_of_plain_torch_and_gives_its_bits": 4,
    "test_code_that_is_compiled_around_the_engine_compiles_no_more_after_its_second_step": 4,
    "test_units_give_the_bits_of_the_model_as_it_is": 4,
    "test_a_save_in_the_middle_of_a_step_is_whole_or_an_error": 3,
    "test_a_run_that_saves_and_one_that_resumes_have_the_bits_of_one_at_a_stretch": 3,
    "test_experts_without_tokens_change_no_bit": 4,
    "test_a_mesh_that_the_caller_has_set_changes_nothing": 4,
    "test_a_rank_that_goes_another_way_is_one_named_error_everywhere_or_changes_nothing": 6,
    "test_in_every_way_experts_of_leaf_modules_have_the_bits_of_stage_2_and_their_gradients_leave_during_backward": 2,
    "test_the_sound_front_end_passes": 15,
    "test_what_is_damaged_is_refused_or_does_not_matter": 1,
    "test_what_p_data_gave_once_is_followed_for_as_long_as_it_is_kept": 4,
    "test_delayed_parameters_are_a_step_behind_until_they_are_flushed": 3,
    "test_no_transfer_is_implicit": 4,
    "test_on_any_mesh_the_bits_are_those_of_eager_optax": 3,
    "test_a_read_by_hand_after_a_step_sees_finished_values": 14,
    "test_weights_that_are_put_back_have_their_master_weights": 7,
    "test_a_copy_to_one_ranks_device_that_fails_ends_the_engines_of_all_within_the_groups_time": 1,
    "test_each_further_attempt_raises_the_first_error_again": 4,
    "test_a_whole_loss_over_weights_is_one_graph_where_they_are_gathered": 2,
    "test_with_strict_promotion_the_bits_are_the_same": 1,
    "test_ranks_are_places_in_the_mesh_not_device_ids": 1,
    "test_delayed_parameters_are_those_of_a_step_before_from_the_warm_up_on": 1,
    "test_value_and_grad_may_be_part_of_a_compiled_function": 2,
    "test_compiled_models_do_not_compile_again_and_see_finished_values": 3,
    "test_experts_are_gathered_when_tokens_are_routed_to_them": 1,
    "test_what_is_saved_while_others_are_in_place_changes_nothing": 8,
    "test_ranks_that_route_to_other_experts_train_as_torch_does_with_the_mean_of_their_gradients": 1,
    "test_narrow_states_have_the_bits_of_one_device": 1,
    "test_explicit_axes_are_taken_like_auto_ones": 1,
    "test_training_at_stage_3_is_training_at_stage_2": 1,
    "test_an_interrupt_at_any_line_leaves_the_state_before_the_step_or_after_it": 2,
    "test_compiled_blocks_are_compiled_once_and_give_the_bits_of_the_model_as_it_is": 3,
    "test_every_schedule_and_element_type_gives_the_bits_of_stage_2": 4,
    "test_two_processes_and_one_that_resumes_what_they_have_saved_have_them_too": 1,
    "test_the_bits_are_those_of_one_device_on_the_averaged_gradients": 2,
    "test_a_resumed_run_is_the_uninterrupted_one": 4,
    "test_who_resumes_on_other_devices_has_them_too": 3,
    "test_a_schedule_does_step_by_step_what_it_does_to_torchs_optimizer": 30,
    "test_weights_that_are_clipped_after_each_step_are_those_of_a_counted_write": 8,
    "test_activations_on_the_host_change_no_bit_and_take_no_weight_along": 8,
    "test_the_device_gets_the_bits_that_the_host_gets": 8,
    "test_the_bits_are_those_of_the_direct_way": 9,
    "test_fifty_steps_of_a_model_have_the_bits_of_eager_adamw": 2,
    "test_an_adapter_on_a_base_that_is_loaded_quantised_gets_the_bits_of_torchs_optimizer": 2,
    "test_optax_goes_on_from_the_export_with_the_same_bits_and_back": 4,
    "test_functions_of_torch_func_take_an_engines_model": 21,
    "test_a_graph_that_left_its_module_another_way_reads_whole_parameters": 14,
    "test_a_parameter_that_took_anothers_place_is_named": 19,
    "test_tensors_over_the_memory_of_a_trained_parameter_are_named": 14,
    "test_code_runs_and_says_what_stands_there": 37,
    "test_a_mesh_changes_no_bits": 3,
    "test_whatever_follows_sees_the_update_made": 9,
    "test_what_stands_before_as_optax_has_the_effect_that_it_has_on_adamw": 2,
    "test_a_run_is_that_of_torchs_fused_adamw": 2,
    "test_a_run_of_sft_trainer_is_that_of_torchs_fused_adamw_and_resumes": 2,
    "test_a_function_that_the_user_has_compiled_follows_the_loss_scale": 2,
    "test_a_sharded_tree_of_states_is_saved_by_orbax_and_nobody_has_it_whole": 2,
    "test_attention_in_evaluation_is_the_same_function_while_an_update_runs": 3,
    "test_a_resumed_run_has_the_bits_of_an_uninterrupted_one": 6,
    "test_each_way_of_running_gives_the_same_bits": 12,
}
"""Laws of which ``make test`` checks so many cases, from the first to the last; ``make test-all`` checks the others."""


def mark_others_slow(items: list[pytest.Item]) -> None:
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if (name := getattr(item, "originalname", "")) in SAMPLED and not any(item.iter_markers("slow")):
            cases.setdefault((item.path, name), []).append(item)
    for (_, name), each in cases.items():
        kept = {len(each) * i // SAMPLED[name] for i in range(SAMPLED[name])}
        for i, item in enumerate(each):
            if i not in kept:
                item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    mark_others_slow(items)
    for item in filter(needs_accelerator, items):
        item.add_marker("gpu")
    yield
    place = {str(Path(__file__).parent / file): i for i, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(str(item.path), len(LONGEST)))
    if any(needs_accelerator(item) for item in items):
        from tests.support import simulated

        if simulated.why_not() is None:
            simulated.prepare()  # before any test's backward


def collect_garbage_of_others() -> None:
    """Collections in tests need not walk torch, jax and what earlier files left: 0.02 s in place of 0.2 to 0.4."""
    gc.collect()
    gc.freeze()


class ModuleOfTests(pytest.Module):
    """A file of tests; one that needs a framework that is not installed is skipped by name."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except pytest.Collector.CollectError as error:
            missing = re.search(r"No module named '(\w+)", str(error))
            if missing is None or missing[1] not in OPTIONAL:
                raise
            pytest.skip(f"{missing[1]} is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return ModuleOfTests.from_parent(parent, path=module_path)


@pytest.fixture
def accelerator() -> Iterator[str]:
    """The type of an accelerator of torch: CUDA where there is one, else the simulated device."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        yield "cuda"
        return
    from tests.support import simulated

    if (missing := simulated.why_not()) is not None:
        pytest.skip(missing)
    with simulated.available():
        yield simulated.NAME
