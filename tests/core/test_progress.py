"""The bar of saves, loads, exports and of building a model: all bytes, on rank 0, and only where somebody looks."""

import io
import sys
from typing import ClassVar

import pytest

from offload_core.support.progress import progress


class Bar:
    """In place of tqdm's: notes what it is told."""

    made: ClassVar[list["Bar"]] = []

    def __init__(self, *, desc, total, **settings):
        self.what, self.total, self.settings, self.done = desc, total, settings, 0
        self.is_open = True
        Bar.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.is_open = False

    def update(self, n):
        assert self.is_open
        self.done += n


@pytest.fixture
def bars(monkeypatch):
    monkeypatch.setattr("tqdm.tqdm", Bar)
    Bar.made = []
    return Bar.made


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("asked", "on_terminal", "rank", "delay"),
    [
        (None, False, 0, None),
        (None, True, 0, 1.0),
        (None, True, 1, None),
        ("1", False, 0, 0.0),
        ("1", False, 1, None),
        ("0", True, 0, None),
    ],
)
def test_rank_0_shows_a_bar_on_a_terminal_or_if_it_is_asked_for(bars, monkeypatch, asked, on_terminal, rank, delay):
    monkeypatch.setattr(sys, "stderr", Terminal() if on_terminal else io.StringIO())
    environ = {} if asked is None else {"OFFLOAD_CORE_PROGRESS": asked}
    with progress("saving", 10, rank=rank, environ=environ) as advance:
        advance(4)
        advance(6)
    shown = [(bar.what, bar.total, bar.done, bar.settings["delay"], bar.is_open) for bar in bars]
    assert shown == ([] if delay is None else [("saving", 10, 10, delay, False)])


def test_a_bar_ends_with_an_error(bars):
    with pytest.raises(OSError, match="full"), progress("saving", 10, rank=0, environ={"OFFLOAD_CORE_PROGRESS": "1"}):
        raise OSError("full")
    assert [bar.is_open for bar in bars] == [False]


def test_without_tqdm_there_is_no_bar_and_an_error_only_if_it_was_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress("saving", 10, rank=0, environ={}) as advance:
        advance(10)
    with (
        pytest.raises(ModuleNotFoundError, match=r"OFFLOAD_CORE_PROGRESS=1 needs tqdm.*pip install 'offload-core\[log"),
        progress("saving", 10, rank=0, environ={"OFFLOAD_CORE_PROGRESS": "1"}),
    ):
        pass


def test_nothing_is_printed_where_nobody_looks(capfd, tmp_path):
    torch = pytest.importorskip("torch")
    from frontends.torch import wrap

    engine = wrap(torch.nn.Linear(64, 64))
    engine.save_checkpoint(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "saved")
    engine.export_safetensors(tmp_path / "weights")
    assert capfd.readouterr() == ("", "")


def test_torch_shows_all_bytes_of_what_takes_long(bars, monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    from frontends.torch import init, wrap

    monkeypatch.setenv("OFFLOAD_CORE_PROGRESS", "1")
    fields = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}
    with init(**fields):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
    engine = wrap(model, **fields)
    engine.save_checkpoint(tmp_path / "saved")
    engine.save_checkpoint(tmp_path / "saved", wait=False)  # it would draw over the bar of the training
    engine.wait_for_checkpoint()
    engine.load_checkpoint(tmp_path / "saved")
    engine.export_safetensors(tmp_path / "weights")
    n_bytes = 4 * 256 * 256 * 4
    assert [bar.what for bar in bars] == [
        "building the model",
        "building states",
        "saving step-00000000",
        "loading step-00000000.1",
        "exporting weights",
    ]
    assert not any(bar.is_open for bar in bars)
    building, states, saving, loading, exporting = bars
    assert (building.total, building.done) == (None, n_bytes)
    assert (states.total, states.done) == (n_bytes, n_bytes)
    assert saving.done == saving.total
    assert 3 * n_bytes < saving.total < 3.1 * n_bytes
    assert 3 * n_bytes <= loading.done <= loading.total
    assert (exporting.total, exporting.done) == (n_bytes, n_bytes)


def test_jax_shows_all_bytes_of_what_takes_long(bars, monkeypatch, tmp_path):
    jax = pytest.importorskip("jax")
    from frontends.jax import init, wrap

    monkeypatch.setenv("OFFLOAD_CORE_PROGRESS", "1")
    offloaded = wrap(init(lambda key: {"w": jax.random.normal(key, (256, 256))}, jax.random.key(0)))
    offloaded.save_checkpoint(tmp_path / "saved")
    offloaded.load_checkpoint(tmp_path / "saved")
    offloaded.export_safetensors(tmp_path / "weights")
    n_bytes = 256 * 256 * 4
    building, states, saving, loading, exporting = bars
    assert (building.total, building.done) == (n_bytes, n_bytes)
    assert (states.total, states.done) == (n_bytes, n_bytes)
    assert saving.done == saving.total > 2 * n_bytes
    assert 2 * n_bytes <= loading.done <= loading.total
    assert (exporting.total, exporting.done) == (n_bytes, n_bytes)
