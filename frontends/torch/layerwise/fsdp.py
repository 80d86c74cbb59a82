"""Blocks under FSDP2 (``fully_shard``): it gathers a block once for all micro-batches, and reduces its gradients once.

FSDP2's hooks gather a block as the first line comes to it. They would release it behind the first micro-batch, and
reduce gradients behind each one's backward. So meanwhile they do neither, and this class does both.
"""

from typing import Any

from torch import nn

from offload_core.errors import StateError

from ..params.fsdp import fsdp_modules, groups_of, roots_of
from ..stage3.sharding import Blocks

_REDUCES = ("reduce_grads", "all_reduce_grads")
"""The attributes of a group that say what happens to gradients behind a backward."""


class FsdpBlocks(Blocks):
    """A context in which several micro-batches run block by block, over parameters that FSDP2 has sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._groups = [group for module in fsdp_modules(model) for group in groups_of(module)]
        if not all(group.reduce_grads for group in self._groups):
            raise StateError("accumulate() inside no_sync(); expected it outside: it reduces each block once anyway")
        self._reduces = [[getattr(group, name) for name in _REDUCES] for group in self._groups]
        self._reduced = False
        """True once all gradients were reduced."""

    def __enter__(self) -> Blocks:
        for group in self._groups:
            group.reshard = _stay
            self._set(group, [False, False])
        for root in roots_of(self._model):
            root._state_ctx.is_last_backward = False
        return self

    def __exit__(self, *error: object) -> None:
        if not self._reduced:
            for group in self._groups:
                for param in group.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if (whole := getattr(param, "_unsharded_param", None)) is not None:
                        whole.grad = None
            self._end()

    @staticmethod
    def _set(group: Any, reduces: list[bool]) -> None:
        for name, value in zip(_REDUCES, reduces, strict=True):
            setattr(group, name, value)

    def hold(self, block: nn.Module) -> None:
        for module in fsdp_modules(block):
            module.unshard(async_op=True)

    def release(self, block: nn.Module) -> None:
        for group in self._groups_in(block):
            group.wait_for_unshard()
            group._to_sharded()

    def before_backward(self, block: nn.Module) -> None:
        for module in fsdp_modules(block):
            module.unshard()

    def after_backward(self, block: nn.Module) -> None:
        for group in self._groups:  # those before the block have gradients, too
            if any(_has_gradient(param) for param in group.fsdp_params):
                group.post_backward()

    def reduce(self, block: nn.Module | None) -> None:
        if block is None:
            self._reduced = True
            self._end()
            return
        for group in self._groups_in(block):
            self._set(group, [True, True])
            group.post_backward()

    def _end(self) -> None:
        """Reduce the gradients that are left, and let FSDP2 end the backward and go on by itself."""
        for group, reduces in zip(self._groups, self._reduces, strict=True):
            self._set(group, reduces)
            vars(group).pop("reshard", None)
            group.post_backward()
        for root in roots_of(self._model):
            root._state_ctx.is_last_backward = True
            root._root_post_backward_final_callback()
        for group in self._groups:
            group.wait_for_unshard()
            group._to_sharded()

    @staticmethod
    def _groups_in(block: nn.Module) -> list[Any]:
        return [group for module in fsdp_modules(block) for group in groups_of(module)]


def _has_gradient(param: Any) -> bool:
    whole = getattr(param, "_unsharded_param", None)
    return whole is not None and whole.grad is not None


def _stay() -> None:
    """Keep a group as it is, where FSDP2 would release it."""
