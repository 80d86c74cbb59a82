"""What tests with Hugging Face's libraries share."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def alone():
    """No network, and one thread of torch: for models this small more only wait for each other."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield
    torch.set_num_threads(n_threads)
