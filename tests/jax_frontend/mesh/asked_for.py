"""Laws that test_resumes.py asks two processes for: pytest itself collects none of them."""

import os
import signal

import jax
import pytest

from offload_core.checkpoint.shard_writer import ShardWriter
from offload_core.errors import CollectiveError
from tests.support.jax_resumes import SAVED_AT, begin, differences, resume, save, train


@pytest.mark.parametrize(("kind", "fields"), [("fp32", {"stage": 3}), ("late", {})], ids=["fp32", "late"])
def test_two_processes_save_and_resume(kind, fields, folder):
    for act in (save, resume):
        assert differences(act(folder, kind, 4, **fields), kind) == []


def test_the_second_is_killed_in_its_second_save(folder):
    offloaded, loader = begin("fp32", 4, stage=3)
    train(offloaded, loader, SAVED_AT)
    offloaded.save_checkpoint(folder, stateful={"loader": loader}, extras="fp32")
    train(offloaded, loader, 1)
    if jax.process_index() == 1:
        ShardWriter._put = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match="resume from the last checkpoint"):
        offloaded.save_checkpoint(folder)
