"""The choice of the parameters of a model that Muon updates, and of those that it leaves to AdamW."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from offload_core.config.matrices import check_some, is_head, is_matrix, is_table, named
from offload_core.config.matrices import tell as tell_choice
from offload_core.config.options import OffloadConfig

from .tensors import memory_order

Named = Sequence[tuple[str, torch.Tensor]]


def groups_for(model: nn.Module, params: Named, config: OffloadConfig, *, tell: bool) -> list[Any]:
    """Return the parameters of a model as groups: matrices, and others for AdamW. Where the configured rule takes any
    parameter, return them as they are.

    Args:
        tell: print the choice.

    Raises:
        ConfigError: ``muon_params`` names what the model has not, or there is no matrix.
    """
    if config.optimizer != "muon":
        return [*params]
    names = [name for name, _ in params]
    chosen = hidden_matrices(model, params) if config.muon_params is None else named(names, config.muon_params)
    check_some(config, chosen)
    others = [name for name in names if name not in chosen]
    if tell:
        tell_choice(names, chosen)
    groups: list[Any] = [{"params": [entry for entry in params if entry[0] in chosen]}]
    rest = [{"params": [entry for entry in params if entry[0] not in chosen], **config.adamw_group()}]
    return groups + rest if others else groups


def hidden_matrices(model: nn.Module, params: Named) -> Collection[str]:
    """Return the names of a model's hidden matrices: parameters of two dimensions, and stacks of such (experts).

    These are left out: weights of embeddings, of convolutions and of heads, and tables by their names. Heads are the
    model's own (``get_output_embeddings()``) and those by their names. If there is none, the last linear layer is one,
    but in a model with embeddings only if it has as many outputs as the largest of them has rows.
    """
    modules = [*model.modules()]
    tables = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    own = getattr(model, "get_output_embeddings", lambda: None)()
    heads: Sequence[nn.Module] = [own] if isinstance(own, nn.Module) else []
    if not heads and not any(is_head(name) for name, _ in params):
        rows = max((table.num_embeddings for table in tables), default=None)
        last = [module for module in modules if isinstance(module, nn.Linear)][-1:]
        heads = [module for module in last if rows in (None, module.out_features)]
    convolutions = [module for module in modules if isinstance(module, nn.modules.conv._ConvNd)]
    left_out = {id(param) for module in (*tables, *heads, *convolutions) for param in module.parameters()}
    return {
        name
        for name, param in params
        if not (id(param) in left_out or is_table(name) or is_head(name))
        and is_matrix(param.shape, stacks=True)
        and memory_order(param) is None
    }
