"""Tests of how laws are checked: none is dropped, and two processes report the outcome of each."""

from collections import Counter

import pytest

from tests.support.jax_pair import Pair

LAWS = """
import threading
import jax, pytest

def test_passes():
    assert jax.process_count() == 2

def test_fails_in_one():
    x = 3
    assert x == 3 + jax.process_index()

def test_skips():
    pytest.skip("no reason")

def test_hangs():
    threading.Event().wait()
"""


def test_no_law_was_dropped(request):
    """Of two tests of one name in a file, pytest takes the second alone."""
    laws = set()
    for law in request.session.genitems(request.node.getparent(pytest.Package)):
        if law.get_closest_marker("integration"):  # their libraries may not be there
            continue
        params = law.callspec.params if hasattr(law, "callspec") else {}
        laws.add((law.path.name, law.originalname, params.get("processes", 1)))
    assert Counter(processes for _, _, processes in laws) == {1: 100, 2: 46}


@pytest.mark.slow
def test_two_processes_say_how_a_law_has_ended_and_end_with_the_one_that_asks(tmp_path):
    (tmp_path / "test_laws.py").write_text(LAWS)
    pair = Pair(tmp_path, tmp_path)
    pair.check("test_passes")
    with pytest.raises(pytest.fail.Exception, match=r"in process 1:(.*\n)+.*assert 3 == \(3 \+ 1\)") as failed:
        pair.check("test_fails_in_one")
    assert "in process 0" not in str(failed.value)
    with pytest.raises(pytest.skip.Exception, match="no reason"):
        pair.check("test_skips")
    pair.check("test_passes")
    pair._connections[1].send(("test_hangs", None))
    pair.close()  # as if this process ended
    assert pair.codes() == [0, 0]
