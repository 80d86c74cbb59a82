"""``initialize`` makes a process group of the process, as DeepSpeed does; it ends with the tests of a file."""

import pytest
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@pytest.fixture(autouse=True, scope="module")
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it keeps groups alive, and children of other threads wait for their threads
