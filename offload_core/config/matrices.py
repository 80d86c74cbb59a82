"""The choice of a model's hidden matrices by their names and shapes, for a rule that updates matrices (Muon)."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..errors import ConfigError
from .options import OffloadConfig

_TABLES = re.compile(r"embed|position|norm")
_TABLE_NAMES = frozenset(("wte", "wpe", "pos", "token", "bias", "scale", "gamma", "beta"))
_HEADS = frozenset(("head", "output", "classifier", "score", "logits", "unembed", "unembedding"))
_MODULE_AND_WEIGHT = 2


def chosen(config: OffloadConfig, shapes: Mapping[str, Sequence[int]], *, stacks: bool) -> Collection[str] | None:
    """Return the names of the parameters that the configured rule updates; None: all of them.

    Args:
        shapes: of a model's parameters.
        stacks: True if parameters of three dimensions are stacks of matrices.

    Raises:
        ConfigError: ``muon_params`` names what the model has not, or there is no matrix.
    """
    if len(config.groups()) == 1:
        return None
    if config.muon_params is not None:
        return named([*shapes], config.muon_params)
    found = {n for n, shape in shapes.items() if is_matrix(shape, stacks=stacks) and not is_table_or_head(n)}
    check_some(config, found)
    return found


def check_some(config: OffloadConfig, found: Collection[str]) -> None:
    """Raise :class:`ConfigError` if no parameter was found."""
    if not found:
        raise ConfigError(
            f"optimizer={config.optimizer!r}: the model has no matrix besides embeddings and heads; expected "
            "muon_params=[...] with the names of some, or another optimizer"
        )


def is_table_or_head(name: str) -> bool:
    """True if a parameter's name is that of a table of vectors (an embedding), or of the layer that makes a model's
    outputs."""
    words = [word.lower() for word in _words(name)]
    last = words[-_MODULE_AND_WEIGHT:]
    return any(_TABLES.search(word) or word in _TABLE_NAMES for word in words) or any(
        word in _HEADS or word.endswith("_head") for word in last
    )


def _words(name: str) -> list[str]:
    return re.findall(r"\w+", name)


def is_matrix(shape: Sequence[int], *, stacks: bool) -> bool:
    """True if a shape is that of a matrix; ``stacks``: or of several, one after the other."""
    return len(shape) in ((2, 3) if stacks else (2,)) and all(n > 1 for n in shape)


def named(names: Sequence[str], wanted: Iterable[str]) -> Collection[str]:
    """Return the names that are one of the wanted ones, or end with its words: ``"hidden.w"`` and ``"['hidden']['w']"``
    are the same.

    Raises:
        ConfigError: there is no such name.
    """
    found = set()
    for end in wanted:
        words = _words(end)
        fits = {name for name in names if _words(name)[-len(words) :] == words}
        if not fits:
            raise ConfigError(
                f"muon_params: no parameter is named {end!r}, or ends so; expected some of {names[0]!r} … {names[-1]!r}"
            )
        found |= fits
    return found
