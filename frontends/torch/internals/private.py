"""Parts of torch that have no public name, each under the name of its use here.

``compiled.py`` has those that concern compiled code. Nothing else in this package names ``torch._C`` and the like, so a
new version of torch that changes them is met in these two files.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards as TensorGuards
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

no_read = torch._C.DisableTorchFunctionSubclass
"""A context for code that reads no values, and so need not wait for pending parameters."""
no_torch_function = torch._C.DisableTorchFunction
"""A context without ``__torch_function__`` of classes and of modes."""
DISPATCH_ALONE = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a class that handles its uses in ``__torch_dispatch__``."""
parse_to = torch._C._nn._parse_to
"""Parses the arguments of ``Tensor.to``."""

# --- autograd ---------------------------------------------------------------------------------------------

next_node = torch._C._autograd._get_sequence_nr
"""Returns the sequence number of the next node that is made in this thread. Nodes made later have larger ones."""
running_node = torch._C._current_autograd_node
"""Returns the node that a backward runs in this thread; None outside a backward."""
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Returns True if the running backward keeps its graph for another one (``retain_graph=True``)."""
top_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""Returns the innermost hooks on saved tensors, ``(pack, unpack)``; None: there are none."""
pop_saved_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
push_saved_hooks = torch._C._autograd._push_saved_tensors_default_hooks
allows_saved_hooks = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function when the backward that runs in this thread ends without an error."""
backward_number = torch._C._current_graph_task_id
"""Returns the number of the backward that runs in this thread, or ``NO_BACKWARD``. A nested backward has its own."""
NO_BACKWARD = -1
_guard_of_modes = torch._C._InferenceMode


def grad_mode_kept() -> AbstractContextManager[None]:
    """Return a context that undoes changes of grad mode at its end: ``with grad_mode_kept(), torch.no_grad(): ...``

    torch's own contexts are Python code. Ctrl-C in the middle of their ``__enter__`` or ``__exit__`` would leave grad
    mode off, and every later backward would fail. C code enters and leaves this context, so that no interrupt cuts it.
    Inside it grad mode is on until another context says otherwise.
    """
    guard: AbstractContextManager[None] = _guard_of_modes(torch.is_inference_mode_enabled())
    return guard


innermost_transform = torch._C._functorch.peek_interpreter_stack
"""Returns the innermost ``torch.func`` transform that runs here; None: none does."""
outside_transforms = temporarily_clear_interpreter_stack
"""A context outside the ``torch.func`` transforms that run here. Inside them nothing may be written in place."""

# --- memory -----------------------------------------------------------------------------------------------


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return a number of the tensor's storage; None for sparse tensors and wrapper subclasses, which have none."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return None


def storage_users(tensor: torch.Tensor) -> int:
    """Return the number of references to a tensor's storage: its own, one of this call, and those of other tensors."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def is_shared(tensor: torch.Tensor) -> bool:
    """Return True if C++ code has a reference to the tensor, as a node of a graph that has saved it."""
    users = getattr(tensor, "_use_count", None)
    return users is None or users() > 1  # None: this version of torch cannot tell


# --- placed tensors (DTensor) -----------------------------------------------------------------------------


def local_tensor(placed: Any) -> torch.Tensor:
    """Return a DTensor's local tensor itself, without a wait if it is pending; ``to_local()`` makes another one, which
    autograd follows."""
    from torch.distributed.tensor import DTensor

    tensor: torch.Tensor = DTensor._local_tensor.__get__(placed)  # type: ignore[attr-defined]
    return tensor


def around(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a DTensor with this local tensor, placed as ``like``. ``from_local`` would compute with it."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    with no_read():
        meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(like.placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that a mesh was cut from; itself if it was cut from none."""
    return mesh._get_root_mesh()


# --- files of torch.save ----------------------------------------------------------------------------------

SAVED_TENSORS = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2")
"""The functions by whose names a file holds tensors."""
SAVED_BYTES = "torch._utils._rebuild_tensor_v3"
"""The function by whose name a file holds tensors of newer types, whose storages have plain bytes."""
SAVED_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
SAVED_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
"""The function by whose name a file holds tensors of subclasses, or with attributes."""
