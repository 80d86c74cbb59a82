"""The choice of the parameters that a rule of matrices updates (Muon), and of those that it leaves to another rule."""

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from offload_core.config.options import OffloadConfig
from offload_core.errors import ConfigError

from .groups import some_of
from .tensors import memory_order

_OTHERS = re.compile(r"embed|position|(^|[._])(pos|token|bias|norm|wte|wpe|gamma|beta)([._]|$)", re.IGNORECASE)
"""Names of matrices that are tables or lists of vectors."""
_HEADS = re.compile(
    r"(^|[._])(head|output|classifier|score|unembed\w*|embed_out|output_projection)$|_head$", re.IGNORECASE
)
"""Names of modules whose weight makes the model's outputs."""

Named = Sequence[tuple[str, torch.Tensor]]


def groups_for(model: nn.Module, named: Named, config: OffloadConfig, *, tell: bool) -> list[Any]:
    """Return the parameters of a model as groups: matrices, and others for AdamW. Where the configured rule takes any
    parameter, return them as they are.

    Args:
        tell: print the choice.

    Raises:
        ConfigError: ``muon_params`` names what the model has not.
    """
    if config.optimizer != "muon":
        return [*named]
    chosen = _named(named, config.muon_params) if config.muon_params is not None else hidden_matrices(model, named)
    matrices = [(name, param) for name, param in named if name in chosen]
    others = [(name, param) for name, param in named if name not in chosen]
    if not matrices:
        raise ConfigError(
            f"optimizer='muon': {type(model).__name__} has no matrix besides embeddings and heads; expected "
            "muon_params=[...] with the names of some, or another optimizer"
        )
    if tell:
        left = f"; AdamW updates {some_of([name for name, _ in others])}" if others else ""
        print(f"offload-core: Muon updates {some_of([name for name, _ in matrices])}{left}", file=sys.stderr)
    groups: list[Any] = [{"params": matrices}]
    return [*groups, {"params": others, **config.adamw_group()}] if others else groups


def hidden_matrices(model: nn.Module, named: Named) -> set[str]:
    """Return the names of a model's hidden matrices: parameters of two dimensions, and stacks of such (experts).

    These are left out: weights of embeddings, of convolutions and of heads, and tables by their names. A head is the
    model's own (``get_output_embeddings()``), one by its name, or the last linear layer of a model without embeddings.
    """
    modules = [*model.modules()]
    embeddings = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    heads = [module for name, module in model.named_modules() if _HEADS.search(name)]
    own = getattr(model, "get_output_embeddings", lambda: None)()
    heads += [own] if isinstance(own, nn.Module) else []
    linear = [module for module in modules if isinstance(module, nn.Linear)]
    if not embeddings and not heads:
        heads = linear[-1:]
    convolutions = [module for module in modules if isinstance(module, nn.modules.conv._ConvNd)]
    left_out = {id(param) for module in (*embeddings, *heads, *convolutions) for param in module.parameters()}
    return {
        name
        for name, param in named
        if id(param) not in left_out and not _OTHERS.search(name) and _is_matrix(param.shape) and in_order(param)
    }


def _is_matrix(shape: Sequence[int]) -> bool:
    return len(shape) in (2, 3) and all(n > 1 for n in shape)


def in_order(param: torch.Tensor) -> bool:
    """True if a parameter's elements lie row by row in memory."""
    return memory_order(param) is None


def _named(named: Named, wanted: Iterable[str]) -> set[str]:
    found = set()
    for end in wanted:
        names = {name for name, _ in named if name == end or name.endswith(f".{end}")}
        if not names:
            raise ConfigError(
                f"muon_params: no parameter is named {end!r}, or ends so; the first are "
                f"{some_of([name for name, _ in named])}"
            )
        found |= names
    return found
