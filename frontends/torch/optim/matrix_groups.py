"""The choice of the parameters of a model that Muon updates, and of those that it leaves to AdamW."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload_core.config import matrices
from offload_core.config.options import OffloadConfig

from ..params.tensors import memory_order

Named = Sequence[tuple[str, torch.Tensor]]


def groups_for(model: nn.Module, params: Named, config: OffloadConfig, *, tell: bool) -> list[Any]:
    """Return the parameters of a model as groups: matrices, and others for AdamW. Where the configured rule takes any
    parameter, return them as they are.

    Args:
        tell: print the choice.

    Raises:
        ConfigError: ``muon_params`` names what the model has not, there is no matrix, or the choice is not clear.
    """
    if config.optimizer != "muon":
        return [*params]
    names = [name for name, _ in params]
    known = _Known.of(model, params)
    chosen = matrices.chosen(config, known.shapes, stacks=True, left_out=known.left_out, vocabulary=known.rows) or ()
    others = [name for name in names if name not in chosen]
    if tell:
        matrices.tell(names, chosen)
    groups: list[Any] = [{"params": [entry for entry in params if entry[0] in chosen]}]
    rest = [{"params": [entry for entry in params if entry[0] not in chosen], **config.adamw_group()}]
    return groups + rest if others else groups


def hidden_matrices(model: nn.Module, params: Named) -> Collection[str]:
    """Return the names of a model's hidden matrices: parameters of two dimensions, and stacks of such (experts).

    Raises:
        ConfigError: the choice is not clear.
    """
    known = _Known.of(model, params)
    return matrices.hidden_matrices(known.shapes, stacks=True, left_out=known.left_out, vocabulary=known.rows)


class _Known(NamedTuple):
    """What a model's modules say about its parameters."""

    shapes: Mapping[str, Sequence[int]]
    left_out: Collection[str]
    """Names of the weights of embeddings, of convolutions and of heads, and of matrices that lie otherwise in memory.

    Heads are the model's own (``get_output_embeddings()``) and those by their names. If there is none, the last linear
    layer is one, but in a model with embeddings only if it has as many outputs as the largest of them has rows.
    """
    rows: int | None
    """Those of the largest embedding."""

    @classmethod
    def of(cls, model: nn.Module, params: Named) -> "_Known":
        modules = [*model.modules()]
        tables = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        rows = max((table.num_embeddings for table in tables), default=None)
        own = getattr(model, "get_output_embeddings", lambda: None)()
        heads: Sequence[nn.Module] = [own] if isinstance(own, nn.Module) else []
        if not heads and not any(matrices.is_head(name) for name, _ in params):
            last = [module for module in modules if isinstance(module, nn.Linear)][-1:]
            heads = [module for module in last if rows in (None, module.out_features)]
        convolutions = [module for module in modules if isinstance(module, nn.modules.conv._ConvNd)]
        left_out = {param for module in (*tables, *heads, *convolutions) for param in module.parameters()}
        names = {name for name, param in params if param in left_out or memory_order(param) is not None}
        return cls({name: tuple(param.shape) for name, param in params}, names, rows)
