"""The rule of dynamic loss scaling."""

from hypothesis import given
from hypothesis import strategies as st
from strategies import law

from offload_core.config import OffloadConfig
from offload_core.dtypes import BFLOAT16, FLOAT16, FLOAT32
from offload_core.loss_scale import LossScaler, scaler_for


def test_the_scale_doubles_after_a_window_and_halves_on_overflow():
    scaler = LossScaler(8.0, window=3)
    scales = []
    for overflow in (False, False, False, False, True, False, False, False):
        scaler.update(overflow=overflow)
        scales.append(scaler.scale)
    assert scales == [8, 8, 16, 16, 8, 8, 8, 16]


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
    one, two = LossScaler(8.0, window=3), LossScaler(1.0, window=3)
    for _ in range(2):
        one.update(overflow=False)
    two.load_state_dict(one.state_dict())
    for scaler in (one, two):
        scaler.update(overflow=False)
    assert one.scale == two.scale == 16.0


def test_float16_alone_is_scaled_unless_asked():
    assert scaler_for(OffloadConfig(), [FLOAT32, BFLOAT16]) is None
    assert scaler_for(OffloadConfig(loss_scale=1), [FLOAT16]) is None
    dynamic = scaler_for(OffloadConfig(initial_loss_scale=4.0, loss_scale_window=5), [FLOAT16])
    assert (dynamic.scale, dynamic.window) == (4.0, 5)
    fixed = scaler_for(OffloadConfig(loss_scale=32), [FLOAT32])
    assert (fixed.scale, fixed.window) == (32.0, None)
