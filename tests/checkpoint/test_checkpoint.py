"""Checkpoints of pipelines: saved by any number of ranks, loaded by any other, while training goes on or not."""

import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.checkpoint import saving
from offload_core.checkpoint.loading import Target
from offload_core.checkpoint.manifest import file_record, write_manifest
from offload_core.checkpoint.reader import Checkpoint, Want
from offload_core.checkpoint.shard_writer import ShardWriter, Source
from offload_core.checkpoint.stateful import DeferredLoad
from offload_core.device.host import HostDevice
from offload_core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from offload_core.errors import CheckpointError, StateError
from offload_core.layout.regions import Region
from offload_core.support.checkpoint_folder import file_name, find
from offload_core.support.threads import Condition
from offload_core.testing.fake_device import FakeDevice
from offload_core.testing.thread_ranks import run_ranks
from tests.support.checkpoints import Slow, load, one_step, save
from tests.support.oracles import assert_same_bits
from tests.support.pipelines import UNANNOUNCED, Subject, bits, make
from tests.support.rank_pipelines import assert_states, averaged, rank_cases, run_naive, run_rank
from tests.support.strategies import law
from tests.support.waiting import until_one_is_in


@law(40)
@given(ranks=rank_cases(), others=st.integers(1, 6), bucket=st.sampled_from([1, 17, 100, 1 << 20]), wait=st.booleans())
def test_what_some_ranks_save_any_number_loads(tmp_path_factory, ranks, others, bucket, wait):
    folder = tmp_path_factory.mktemp("checkpoints")
    naive, _ = run_naive(averaged(ranks))

    def train_and_save(rank):
        subject, _ = run_rank(ranks[rank.rank], rank, HostDevice())
        _, checkpoints = save(subject, folder, wait=wait)
        checkpoints.wait()

    run_ranks(len(ranks), train_and_save)
    case, zeros = ranks[0], [np.zeros_like(master) for master in ranks[0].masters]
    config = replace(case.config, reduce_bucket_size=bucket, schedule="serial")

    def load_elsewhere(rank):
        subject = Subject(HostDevice(), zeros, case.dtypes, case.groups, config, collectives=rank, hypers=case.hypers)
        load(subject, folder)
        return subject

    assert_states(run_ranks(others, load_elsewhere), naive)
    Checkpoint(folder).verify()


@law(60)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple),
    data=st.data(),
    types=st.sampled_from([(FLOAT32, FLOAT32), (FLOAT32, BFLOAT16), (FLOAT16, FLOAT32)]),
    rows=st.sampled_from([1, 20, 10**6]),
)
def test_any_order_and_cut_of_elements_is_read_into_any_other(tmp_path_factory, shape, data, types, rows):
    numel, dims = int(np.prod(shape)), range(len(shape))
    values = np.arange(numel).reshape(shape)
    orders = [data.draw(st.none() | st.permutations(dims).map(tuple)) for _ in range(2)]
    cuts = [sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))}) for _ in range(2)]
    runs = []
    for order, cut in zip(orders, cuts, strict=True):
        flat = values.transpose(order or dims).reshape(-1)
        runs.append([(Region(shape, low, high - low, order), flat[low:high]) for low, high in pairwise(cut)])
    folder = tmp_path_factory.mktemp("orders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload_core.checkpoint.shard_writer.BLOCK_BYTES", 64)
        patch.setattr("offload_core.checkpoint.reader._MOST_ROWS", rows)
        sources = [Source.of("p", "master", region, part.astype(types[0].numpy)) for region, part in runs[0]]
        writer = ShardWriter(folder / file_name(0, 1), sources, make().pipeline.memory)
        record = file_record(writer)
        writer.write(lambda n_bytes: None)
        write_manifest(folder, {"step": 1, "files": [record | {"blocks": writer.checksums}]})
        got = [np.full(part.size, -1, types[1].numpy) for _, part in runs[1]]
        wants = [Want("p", "master", region, out) for (region, _), out in zip(runs[1], got, strict=True)]
        Checkpoint(folder).read(wants)
    for (region, part), out in zip(runs[1], got, strict=True):
        assert_same_bits(str(region), out, part.astype(types[0].numpy).astype(types[1].numpy))


@pytest.mark.draws(1)
@pytest.mark.filterwarnings(UNANNOUNCED)
@pytest.mark.parametrize("update_in_backward", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_what_is_saved_while_training_goes_on_is_of_the_moment_of_the_call(
    tmp_path, monkeypatch, dtype, update_in_backward
):
    monkeypatch.setattr("offload_core.checkpoint.shard_writer.BLOCK_BYTES", 256)
    subject = make(FakeDevice(), dtype, update_in_backward=update_in_backward, reduce_bucket_size=32)
    one_step(subject)
    subject.pipeline.last_step.finish()
    before = bits(subject)
    slow = Slow(monkeypatch)
    _, checkpoints = save(subject, tmp_path, wait=False)
    trained = threading.Thread(
        target=lambda: [one_step(subject, v) or subject.pipeline.last_step.finish() for v in (3.0, 4.0)]
    )
    trained.start()
    until_one_is_in(ShardWriter._await_claim, Condition.wait_for, thread=trained)  # more blocks than buffers
    slow.go_on()
    trained.join()
    checkpoints.wait()
    assert bits(subject) != before
    other = make(FakeDevice(), dtype, update_in_backward=update_in_backward)
    load(other, tmp_path)
    assert bits(other) == before


def test_host_memory_of_the_past_is_bounded_by_the_buffers_and_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr("offload_core.checkpoint.shard_writer.BLOCK_BYTES", 256)
    subject = make(FakeDevice(), reduce_bucket_size=32)
    held = subject.pipeline.memory.n_bytes
    slow = Slow(monkeypatch)
    _, checkpoints = save(subject, tmp_path, wait=False)
    assert subject.pipeline.memory.n_bytes == held + 8 * 256
    slow.go_on()
    checkpoints.wait()
    assert subject.pipeline.memory.n_bytes == held


def test_what_is_not_trained_and_plain_values_come_back(tmp_path):
    subject, frozen = make(), np.arange(6, dtype=np.int32).reshape(2, 3)
    region = Region(frozen.shape, 0, frozen.size)
    state = {"lr": 0.1, "table": np.eye(3), "nested": [(1, None), {"a": np.float32(2)}]}
    save(
        subject,
        tmp_path,
        sources=[Source.of("frozen", "param", region, frozen)],
        shapes={"frozen": (frozen.shape, frozen.dtype)},
        state=state,
        own=[1, 2],
    )
    out = np.zeros(6, np.int32)
    target = Target("frozen", (2, 3), lambda kind: [Want("frozen", kind, region, out)])
    loaded = load(make(), tmp_path, [target])
    assert out.tolist() == list(range(6))
    assert loaded.own == [1, 2]
    assert loaded.state["table"].tolist() == np.eye(3).tolist()
    assert repr(loaded.state["nested"]) == repr(state["nested"])
    assert loaded.step == 1


def test_a_folder_of_deepspeeds_is_neither_saved_to_nor_loaded(tmp_path):
    """Both write ``latest``: DeepSpeed would no longer find its own."""
    subject = make()
    (tmp_path / "global_step16").mkdir()
    (tmp_path / "latest").write_text("global_step16\n")
    with pytest.raises(CheckpointError, match="names 'global_step16', a checkpoint of another program"):
        save(subject, tmp_path, step=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step16", "latest"]
    assert (tmp_path / "latest").read_text() == "global_step16\n"
    with pytest.raises(CheckpointError, match="no checkpoint of ours.*zero_checkpoint"):
        find(tmp_path)


def test_a_checkpoint_with_a_tag_takes_the_place_of_that_of_the_same_tag(tmp_path):
    subject = make()
    for step in (3, 4):
        path, _ = save(subject, tmp_path, step=step, tag="epoch_1.best")
        assert path == Checkpoint(tmp_path).path == tmp_path / "epoch_1.best"
        assert load(subject, path).step == step
    save(subject, tmp_path, step=5, tag="other", latest=False)
    save(subject, tmp_path, step=6, latest=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch_1.best", "latest", "other", "step-00000006"]
    assert load(subject, tmp_path).step == 4
    assert load(subject, tmp_path / "other").step == 5
    for step in (7, 8):
        save(subject, tmp_path, step=step, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch_1.best", "latest", "other", "step-00000008"]


@pytest.mark.parametrize("moment", ["moved aside", "replaced"])
def test_a_tag_whose_replacement_was_killed_is_the_old_checkpoint_or_the_new_one(tmp_path, moment):
    subject = make()
    old, _ = save(subject, tmp_path, step=3, tag="best")
    temporary = tmp_path / ".best.replaced"
    old.rename(temporary)
    if moment == "replaced":
        new, _ = save(make(), tmp_path / "new", step=4, tag="best")
        new.rename(old)
    expected = 3 if moment == "moved aside" else 4
    assert load(subject, tmp_path).step == expected
    save(subject, tmp_path, step=5)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "new") == ["best", "latest", "step-00000005"]
    assert load(subject, tmp_path / "best").step == expected


def test_two_processes_may_give_a_checkpoint_its_name_again_at_once(tmp_path, monkeypatch):
    path, _ = save(make(), tmp_path, step=3, tag="best")
    path.rename(tmp_path / ".best.replaced")
    rename = Path.rename

    def another_was_first(self, target):
        rename(self, target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", another_was_first)
    assert Checkpoint(tmp_path).path == path


def test_a_folder_of_somebody_elses_is_not_replaced_and_a_tagged_one_is_not_rotated(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("42")
    with pytest.raises(CheckpointError, match="no checkpoint of ours, and would be replaced"):
        save(make(), tmp_path, tag="mine")
    for other in ({"tag": "other"}, {"latest": False}):
        with pytest.raises(CheckpointError, match="expected one of them"):
            save(make(), tmp_path, keep=2, **other)
    assert [p.name for p in tmp_path.rglob("*")] == ["mine", "thesis.tex"]


def test_rotation_keeps_the_last_written_and_latest_names_the_last(tmp_path):
    subject = make()
    for step in (1, 2, 30, 3, 3):
        path, _ = save(subject, tmp_path, step=step, keep=3)
        assert Checkpoint(tmp_path).path == path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000003.1", "step-00000030"]


def test_a_save_in_mid_step_is_refused_and_nothing_is_left(tmp_path):
    subject = make()
    subject.add_gradient(0, np.ones(40, BFLOAT16.numpy))
    with pytest.raises(StateError, match="between backward"):
        save(subject, tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_models_checkpoint_is_refused_and_changes_nothing(tmp_path):
    subject = make()
    one_step(subject)
    save(subject, tmp_path)
    other = Subject(HostDevice(), [np.ones(40, np.float32)] * 2, [BFLOAT16] * 2, [0, 0], subject.pipeline.config)
    before = bits(other)
    with pytest.raises(CheckpointError, match=r"'p1' has shape \[100\] in it, expected \[40\]"):
        load(other, tmp_path)
    with pytest.raises(CheckpointError, match="it lacks 'q'"):
        load(other, tmp_path, [Target("q", (1,), lambda kind: [])])
    third = Subject(HostDevice(), [np.ones(40, np.float32)], [BFLOAT16], [0], subject.pipeline.config)
    with pytest.raises(CheckpointError, match="this model lacks 'p1'"):
        load(third, tmp_path)
    assert bits(other) == before
    one_step(other)


def test_a_load_that_is_not_strict_keeps_what_the_checkpoint_lacks(tmp_path):
    subject, other = make(), make()
    one_step(subject)
    save(subject, tmp_path)
    mine, theirs = states_of(other), states_of(subject)
    with pytest.raises(CheckpointError, match="it lacks 'elsewhere'"):
        load(other, tmp_path, names=["elsewhere", "p1"])
    load(other, tmp_path, names=["elsewhere", "p1"], strict=False)
    assert states_of(other) == [mine[0], theirs[1]]
    assert mine[1] != theirs[1]


def test_a_load_of_weights_alone_leaves_moments_and_counts(tmp_path):
    subject, other = make(), make()
    for _ in range(2):
        one_step(subject)
    save(subject, tmp_path)
    one_step(other, 0.25)
    before = states_of(other)
    load(other, tmp_path, states=False)
    for (master, *rest), (master_before, *rest_before), (master_there, *_) in zip(
        states_of(other), before, states_of(subject), strict=True
    ):
        assert master == master_there != master_before
        assert rest == rest_before


def states_of(subject):
    """Of each parameter the bits of its states, and its updates."""
    counts = map(float, subject.pipeline.counts.steps)
    return [[*(a.tobytes() for a in subject.states(i)), n] for i, n in enumerate(counts)]


def test_after_a_load_that_broke_off_nothing_goes_on_until_another_is_loaded(tmp_path):
    subject = make()
    good, _ = save(subject, tmp_path, step=1)
    bad, _ = save(subject, tmp_path, step=2)
    [shard] = bad.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{shard.name}: bytes .* are not those that were written"):
        load(subject, tmp_path)
    with pytest.raises(StateError, match="expected another one to be loaded"):
        one_step(subject)
    load(subject, good)
    subject.pipeline.gradients.drop()
    assert one_step(subject).updated


def test_a_file_that_another_process_removes_meanwhile_is_named_so(tmp_path, monkeypatch):
    def removed_meanwhile(path, text):
        path.with_suffix(".new").rename(path)

    monkeypatch.setattr(saving, "durable", removed_meanwhile)
    with pytest.raises(CheckpointError, match="saving failed in another process, which says there why, or somebody"):
        save(make(), tmp_path, step=1)


def test_an_error_of_one_rank_is_an_error_of_all_and_leaves_the_checkpoints_before(tmp_path, monkeypatch):
    write = ShardWriter.write

    def fail_on_rank_1(writer, advance):
        if "shard-00001" in writer.path.name and writer.path.parent.name.startswith(".step-00000002"):
            writer.close()
            raise OSError(28, "No space left on device")
        write(writer, advance)

    monkeypatch.setattr(ShardWriter, "write", fail_on_rank_1)

    def act(rank):
        masters = [np.ones(100, np.float32)]
        config = make().pipeline.config
        subject = Subject(HostDevice(), masters, [BFLOAT16], [0], config, collectives=rank)
        first, _ = save(subject, tmp_path, step=1)
        with pytest.raises(CheckpointError, match="No space left|saving failed in another process"):
            save(subject, tmp_path, step=2)
        assert load(subject, tmp_path).checkpoint.path == first

    run_ranks(2, act)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def of_rank(rank):
    ones = [np.ones(100, np.float32)]
    return Subject(HostDevice(), ones, [BFLOAT16], [0], make().pipeline.config, collectives=rank)


@pytest.mark.parametrize("name", ["wait", "keep", "step"])
def test_what_ranks_are_asked_differently_is_refused_by_all(tmp_path, name):
    """One that waited would meet one that goes on training."""

    def act(rank):
        subject = of_rank(rank)
        asked = {"wait": rank.rank == 0, "keep": 1 + rank.rank, "step": 1 + rank.rank}
        with pytest.raises(CheckpointError, match=f"'{name}'.*expected the same of all|failed in process 1"):
            save(subject, tmp_path, **{name: asked[name]})
        save(subject, tmp_path)

    run_ranks(2, act)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_an_argument_that_one_rank_refuses_is_refused_by_all(tmp_path):
    def act(rank):
        subject = of_rank(rank)
        with pytest.raises(CheckpointError, match="keep: got 0|failed in process 0"):
            save(subject, tmp_path, keep=rank.rank)
        save(subject, tmp_path)

    run_ranks(2, act)


def test_what_fails_last_on_one_rank_fails_on_all(tmp_path):
    """Code of a user's objects: it ran on the other rank, and neither trains on with a mixture."""

    def act(rank):
        subject = of_rank(rank)
        one_step(subject)
        save(subject, tmp_path)
        ran = []
        parts = [
            DeferredLoad("first", lambda: ran.append(1)),
            DeferredLoad("second", lambda: ran.append(1 // rank.rank)),
        ]
        words = "broke off in second.*loaded are weights, optimizer states, first, and not second"
        with pytest.raises(CheckpointError, match="failed in process 0" if rank.rank else words):
            load(subject, tmp_path, accept=lambda loaded: parts)
        assert len(ran) == 1 + rank.rank
        with pytest.raises(StateError, match="broke off"):
            one_step(subject)
        load(subject, tmp_path)
        one_step(subject)

    run_ranks(2, act)
