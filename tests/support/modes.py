"""The modes of torch that code may leave behind in a thread, for tests that interrupt it."""

import contextlib
import sys

import torch
from torch.autograd import grad_mode
from torch.utils import _contextlib

FILES = (grad_mode.__file__, _contextlib.__file__, contextlib.__file__)
"""Python code that switches modes: an interrupt may come in its middle, too."""


def modes():
    """Return all modes of this thread."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "hooks on saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "torch functions": torch._C._is_torch_function_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "compiler": torch._C._dynamo.eval_frame.get_eval_frame_callback(),
        "recursion": sys.getrecursionlimit(),
    }


def put_back(before):
    """Undo what a failure has left, for the next test."""
    torch.set_grad_enabled(before["grad"])
    torch.set_default_dtype(before["dtype"])
    while torch._C._autograd._top_saved_tensors_default_hooks(True) != before["hooks on saved tensors"]:
        torch._C._autograd._pop_saved_tensors_default_hooks()
