"""A law for two processes of which one ends: test_resumes.py has a pair of its own check it."""

import os
import signal

import jax
import pytest

from offload_core.checkpoint.shard_writer import ShardWriter
from offload_core.errors import CollectiveError
from tests.support.jax_resumes import SAVED_AT, begin, train


def test_the_second_is_killed_in_its_second_save(folder):
    offloaded, loader = begin("fp32", 4, stage=3)
    train(offloaded, loader, SAVED_AT)
    offloaded.save_checkpoint(folder, stateful={"loader": loader}, extras="fp32")
    train(offloaded, loader, 1)
    if jax.process_index() == 1:
        ShardWriter._put = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match="resume from the last checkpoint"):
        offloaded.save_checkpoint(folder)
