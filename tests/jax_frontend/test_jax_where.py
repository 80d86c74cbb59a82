"""``where()`` of a wrapped tree: for whoever waits for an update, in another thread or a signal handler."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from frontends.jax import offloaded as front_end
from frontends.jax import wrap
from frontends.jax.devices.device import JaxDevice
from tests.support.interrupts import handled_at_each_line


def tree(seed):
    return {"w": jax.random.normal(jax.random.key(seed), (40, 30)), "b": jnp.full(7, float(seed))}


@pytest.mark.quick
def test_an_update_that_nobody_waits_for_is_named_and_not_awaited(monkeypatch):
    offloaded = wrap(tree(0), lr=1e-2, gradient_accumulation_steps=2)
    assert "\n  threads: all idle" in offloaded.where()
    offloaded.update(tree(1))
    begun, arrived, host_array = threading.Event(), threading.Event(), JaxDevice.host_array

    def late(*args):
        begun.set()
        arrived.wait()
        return host_array(*args)

    monkeypatch.setattr(JaxDevice, "host_array", late)
    offloaded.update(tree(2), wait=False)
    begun.wait()
    said = offloaded.where()
    assert re.search(r"^  thread 'offload-core update': Task\.run, for [\d.]+ s; 0 later$", said, re.MULTILINE)
    assert "\n  updates: 0, and 0 skipped\n  micro-steps since the last update: 1 of 2, and gradients of " in said
    assert "\n  call: update()\n" in said
    arrived.set()
    assert offloaded.count == 1
    assert "\n  updates: 1, and 0 skipped\n" in offloaded.where()


def test_a_signal_handler_may_ask_at_each_line_of_an_update_and_changes_no_bits():
    def trained(ask):
        offloaded = wrap(tree(0), lr=1e-2)
        said = []
        handled_at_each_line(
            lambda: offloaded.update(tree(1)), lambda place: said.append(offloaded.where()) if ask else None
        )
        return said, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(offloaded.params)]

    said, asked = trained(True)
    assert {re.search("^  call: (.*)", text, re.MULTILINE)[1] for text in said} >= {"update()"}
    assert not [text for text in said if "not to be read now" in text]
    assert trained(False)[1] == asked


def test_wrap_has_signals_answered_before_it_waits_for_other_processes(monkeypatch):
    told = []
    monkeypatch.setattr(front_end, "answer_signals", told.append)
    monkeypatch.setattr(front_end, "check_start", lambda *args: told.append("other processes"))
    offloaded = wrap(tree(0))
    assert told == [offloaded, "other processes"]
