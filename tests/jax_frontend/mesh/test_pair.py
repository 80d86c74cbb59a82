"""How laws are checked: none is dropped, and what becomes of them in two processes."""

from collections import Counter

import pytest

from tests.support.jax_pair import Pair

LAWS = """
import os, signal, sys
import jax, pytest

def test_passes():
    assert jax.process_count() == 2

def test_fails_in_one():
    x = 3
    assert x == 3 + jax.process_index()

def test_skips():
    pytest.skip("no reason")

def test_dies():
    if jax.process_index() == 1:
        print("these are the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_law_was_dropped(request):
    """Of two tests of one name in a file, pytest takes the second alone."""
    laws = set()
    for law in request.session.genitems(request.node.getparent(pytest.Package)):
        params = law.callspec.params if hasattr(law, "callspec") else {}
        laws.add((law.path.name, law.originalname, params.get("processes", 1)))
    found = Counter(processes for file, _, processes in laws if file != "test_pair.py")
    assert found == {1: 79, 2: 38}


def test_two_processes_say_how_a_law_has_ended_and_end_together(tmp_path):
    (tmp_path / "test_laws.py").write_text(LAWS)
    pair = Pair(tmp_path)
    pair.check("test_passes")
    with pytest.raises(pytest.fail.Exception, match=r"in process 1:(.*\n)+.*assert 3 == \(3 \+ 1\)") as failed:
        pair.check("test_fails_in_one")
    assert "in process 0" not in str(failed.value)
    with pytest.raises(pytest.skip.Exception, match="no reason"):
        pair.check("test_skips")
    pair.check("test_passes")
    for law in ("test_dies", "test_passes"):
        with pytest.raises(pytest.fail.Exception, match="test_dies was the last law") as failed:
            pair.check(law)
        assert "these are the last words" in str(failed.value)
    assert pair.codes() == [-6, -9]
