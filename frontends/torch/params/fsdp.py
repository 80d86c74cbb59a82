"""The engine's support for FSDP2 (``fully_shard``). FSDP2 gathers parameters through separate views of their memory, so
no torch function shows the read. Therefore each ``unshard`` first waits for the updates of the parameters that it
gathers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn

from offload_core.errors import ParameterError

from .pending import await_all


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules that ``fully_shard`` was called on."""
    return [module for module in model.modules() if _is_sharded(module)]


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" and kind.__module__.startswith("torch.") for kind in type(module).__mro__)


def have_gathering_wait(model: nn.Module) -> bool:
    """Have each gathering of parameters wait for their updates. Return False if this version of torch gathers in an
    unknown way. Then every update must end before a forward."""
    for module in fsdp_modules(model):
        groups = _groups(module)
        if groups is None:
            return False
        for group in groups:
            if not hasattr(group.unshard, "waits_for_updates"):
                group.unshard = _waiting(group, group.unshard)
    return True


def _groups(module: Any) -> list[Any] | None:
    """Return the groups of parameters that a module gathers together; None: this version of torch gathers in an unknown
    way."""
    try:
        state = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        found = [group for group in groups if group is not None]
        for group in found:
            [each.sharded_param for each in group.fsdp_params]
    except AttributeError:
        return None
    return found


def groups_of(module: Any) -> list[Any]:
    """Return the groups of parameters that a module gathers together.

    Raises:
        ParameterError: this version of torch gathers in an unknown way.
    """
    groups = _groups(module)
    if groups is None:
        raise ParameterError(
            "FSDP2 of this version of torch gathers parameters in a way that is not known here; expected a version "
            "that docs/install.md names, or a loop with no_sync() in place of accumulate()"
        )
    return groups


def roots_of(model: nn.Module) -> list[Any]:
    """Return FSDP2's states of the outermost modules that it has run."""
    return [state for module in fsdp_modules(model) if (state := module._get_fsdp_state())._is_root]


def named_sharded(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name. For a gathered parameter of FSDP2, return the sharded parameter, which FSDP2 puts
    back into the module when it releases the gathered one."""
    sharded = {}
    for module in fsdp_modules(model):
        for group in _groups(module) or ():
            for each in group.fsdp_params:
                if (whole := getattr(each, "_unsharded_param", None)) is not None:
                    sharded[whole] = each.sharded_param
    return {name: sharded.get(param, param) for name, param in model.named_parameters()}


def _waiting(group: Any, unshard: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(unshard)
    def wait_and_unshard(*args: Any, **kwargs: Any) -> Any:
        await_all(each.sharded_param for each in group.fsdp_params)
        return unshard(*args, **kwargs)

    wait_and_unshard.waits_for_updates = True  # type: ignore[attr-defined]
    return wait_and_unshard


@contextmanager
def gradients_stay(modules: list[Any]) -> Iterator[None]:
    """A context in which a backward leaves each rank's gradients whole and unreduced. The next backward after the
    context reduces all gradients."""
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def kept_gradients(model: nn.Module) -> list[tuple[int, int]]:
    """Return the identity and the version of each gradient that FSDP2 keeps for a later backward, because somebody has
    called ``set_requires_gradient_sync(False)`` or ``set_requires_all_reduce(False)``."""
    groups = [group for module in fsdp_modules(model) for group in _groups(module) or ()]
    kept = [getattr(group, "_partial_reduce_output", None) for group in groups]
    for each in (each for group in groups for each in group.fsdp_params):
        whole = getattr(each, "_unsharded_param", None)
        kept += [getattr(each, "unsharded_accumulated_grad", None), None if whole is None else whole.grad]
    return [(id(gradient), gradient._version) for gradient in kept if gradient is not None]
