"""The choice of a model's hidden matrices by their names and shapes, for a rule that updates matrices (Muon)."""

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..errors import ConfigError
from ..support.checks import some_of
from .options import OffloadConfig

# These match a part of a path in the form of "lm_head": its words in small letters, without numbers.
_EMBEDDING = re.compile(r"(.*_)?[a-z]*emb(ed(ding)?)?s?(_.*)?")
_TABLE = re.compile(r"(.*_)?(wte|wpe|pe|pos|positions?|tokens?|tables?|shared|[a-z]*norm|ln|bias(es)?|scales?)")
_VECTOR = re.compile(r"(.*_)?(gamma|beta|offset|log)|b|g")
_HEAD = re.compile(
    r"(.*_)?(head|outputs?|classifier|score|logits)|fc_out|output_(layer|projection)|seq_relationship|bbox_predictor"
)
_LAYER = re.compile(r"(.*_)?(layers?|blocks?|attention|attn)")


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
    found = {n for n, shape in shapes.items() if is_matrix(shape, stacks=stacks) and not (is_table(n) or is_head(n))}
    check_some(config, found)
    return found


def check_some(config: OffloadConfig, found: Collection[str]) -> None:
    """Raise :class:`ConfigError` if no parameter was found."""
    if not found:
        raise ConfigError(
            f"optimizer={config.optimizer!r}: the model has no matrix besides embeddings and heads; expected "
            "muon_params=[...] with the names of some, or another optimizer"
        )


def tell(names: Sequence[str], matrices: Collection[str]) -> None:
    """Print which of a model's parameters Muon updates, and which AdamW."""
    others = [name for name in names if name not in matrices]
    left = f"; AdamW updates {some_of(others)}" if others else ""
    print(f"offload-core: Muon updates {some_of([n for n in names if n in matrices])}{left}", file=sys.stderr)


def is_table(name: str) -> bool:
    """True if a parameter is by its name a table of vectors and no matrix: an embedding, or vectors of several layers.

    A word for an embedding says so anywhere in the path. A word for another table says so at the end of the parameter's
    own name or of its module's, and one for a vector at the end of its own.
    """
    parts = [*map(_spelled, _parts(name))]
    return (
        any(map(_EMBEDDING.fullmatch, parts))
        or any(map(_TABLE.fullmatch, parts[-2:]))
        or any(map(_VECTOR.fullmatch, parts[-1:]))
    )


def is_head(name: str) -> bool:
    """True if a parameter is by its name in a module that makes a model's outputs, and this module is not within one of
    the model's layers: a module that has a number, or is called a layer, a block or attention."""
    for part in _parts(name):
        if _HEAD.fullmatch(_spelled(part)):
            return True
        if re.search(r"\d", part) or _LAYER.fullmatch(_spelled(part)):
            return False
    return False


def _parts(name: str) -> list[str]:
    """The parts of a path: ``"hidden.w"``, ``"['hidden']['w']"`` and ``"hidden/w"`` have the same."""
    return re.findall(r"[^][.'\"/]+", name)


def _spelled(part: str) -> str:
    return "_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)).lower()


def is_matrix(shape: Sequence[int], *, stacks: bool) -> bool:
    """True if a shape is that of a matrix; ``stacks``: or of several, one after the other."""
    return len(shape) in ((2, 3) if stacks else (2,)) and all(n > 1 for n in shape)


def named(names: Sequence[str], wanted: Iterable[str]) -> Collection[str]:
    """Return the names that are one of the wanted ones, or end with its parts: ``"proj.w"`` names
    ``"hidden.proj.w"`` and ``"['hidden']['proj']['w']"``, and not ``"hidden.q_proj.w"``.

    Raises:
        ConfigError: there is no such name.
    """
    found = set()
    for end in wanted:
        parts = _parts(end)
        fits = {name for name in names if _parts(name)[-len(parts) :] == parts}
        if not fits:
            raise ConfigError(
                f"muon_params: no parameter is named {end!r}, or ends so; expected some of {names[0]!r} … {names[-1]!r}"
            )
        found |= fits
    return found
