"""The rule of dynamic loss scaling."""

from hypothesis import given
from hypothesis import strategies as st

from offload_core.config.options import OffloadConfig
from offload_core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from offload_core.step.loss_scale import LossScaler
from tests.support.strategies import law


def test_the_scale_doubles_after_a_window_and_halves_on_overflow():
    scaler = LossScaler(8.0, window=3)
    scales = []
    for overflow in (False, False, False, False, True, False, False, False):
        scaler.update(overflow=overflow)
        scales.append(scaler.scale)
    assert scales == [8, 8, 16, 16, 8, 8, 8, 16]


def scales_of(scaler, overflows):
    scales = []
    for overflow in overflows:
        scaler.update(overflow=overflow)
        scales.append(scaler.scale)
    return scales


def test_hysteresis_bears_some_overflows_before_it_halves_and_as_many_after_it_doubles():
    overflows = (True, False, True, True, True, False, False, False, True, True, True)
    scales = scales_of(LossScaler(64.0, window=3, hysteresis=3), overflows)
    assert scales == [64, 64, 64, 32, 16, 16, 16, 32, 32, 32, 16]
    consecutive = scales_of(LossScaler(64.0, window=3, hysteresis=3, consecutive=True), overflows)
    assert consecutive == [64, 64, 64, 64, 32, 32, 32, 64, 64, 64, 32]


def test_the_scale_is_not_halved_below_the_least():
    assert scales_of(LossScaler(8.0, window=3, least=3.0), [True] * 3) == [4, 3, 3]
    assert scales_of(LossScaler(1.0, window=3, least=0.25), [True] * 3) == [0.5, 0.25, 0.25]


@law(200)
@given(st.floats(2.0**-4, 2.0**40), st.lists(st.booleans(), max_size=40))
def test_an_overflow_never_raises_the_scale_and_its_absence_never_lowers_it(scale, overflows):
    scaler = LossScaler(scale, window=1)
    for overflow in overflows:
        before = scaler.scale
        scaler.update(overflow=overflow)
        assert scaler.scale <= before if overflow else scaler.scale >= before


def test_a_fixed_scale_stays():
    scaler = LossScaler(8.0, window=None)
    for overflow in (True, False):
        scaler.update(overflow=overflow)
    assert scaler.scale == 8.0


def test_a_loaded_scaler_goes_on_like_the_saved_one():
    one, two = (LossScaler(scale, window=3, hysteresis=2) for scale in (8.0, 1.0))
    for overflow in (True, False, False):
        one.update(overflow=overflow)
    two.load_state_dict(one.state_dict())
    assert scales_of(one, [True]) == scales_of(two, [True]) == [4.0]
    for scaler in (one, two):
        assert scales_of(scaler, [False] * 3) == [4.0, 4.0, 8.0]


def test_float16_alone_is_scaled_unless_asked():
    assert LossScaler.of(OffloadConfig(), [FLOAT32, BFLOAT16]) is None
    assert LossScaler.of(OffloadConfig(loss_scale=1), [FLOAT16]) is None
    dynamic = LossScaler.of(OffloadConfig(initial_loss_scale=4.0, loss_scale_window=5), [FLOAT16])
    assert (dynamic.scale, dynamic.window, dynamic.least, dynamic.hysteresis) == (4.0, 5, 1.0, 1)
    tough = OffloadConfig(min_loss_scale=0.5, loss_scale_hysteresis=3, loss_scale_consecutive_hysteresis=True)
    dynamic = LossScaler.of(tough, [FLOAT16])
    assert (dynamic.least, dynamic.hysteresis, dynamic.consecutive) == (0.5, 3, True)
    fixed = LossScaler.of(OffloadConfig(loss_scale=32), [FLOAT32])
    assert (fixed.scale, fixed.window) == (32.0, None)
