"""The choice of a model's hidden matrices by their names and shapes, for a rule that updates matrices (Muon)."""

import itertools
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
_PLACE = re.compile(r"(.*_)?(wpe|pe|pos|pos[a-z]*|patch|times?|timesteps?|[a-z]*norm|ln)(_.*)?")
_CONVOLUTION = re.compile(r"(.*_)?conv[a-z]*(_.*)?")
_LAYER = re.compile(r"(.*_)?(layers?|blocks?|attention|attn)")


_HIDDEN = frozenset({"hidden", "mlp", "ffn"})
"""Modules that are none of a model's ends."""

_LARGE, _FAR = 1000, 4
"""A dimension of at least ``_LARGE`` elements that is ``_FAR`` times as large as all others is a vocabulary's."""


def chosen(
    config: OffloadConfig,
    shapes: Mapping[str, Sequence[int]],
    *,
    stacks: bool,
    left_out: Collection[str] = (),
    vocabulary: int | None = None,
) -> Collection[str] | None:
    """Return the names of the parameters that the configured rule updates; None: all of them.

    Args:
        shapes: of a model's parameters.
        stacks: True if parameters of three dimensions are stacks of matrices.
        left_out: names of parameters that are known to be no hidden matrices.
        vocabulary: rows of the model's largest embedding; None: that follows from names and shapes.

    Raises:
        ConfigError: ``muon_params`` names what the model has not, there is no matrix, or names and shapes do not say
            which parameters are hidden matrices.
    """
    if len(config.groups()) == 1:
        return None
    if config.muon_params is not None:
        return named([*shapes], config.muon_params)
    found = hidden_matrices(shapes, stacks=stacks, left_out=left_out, vocabulary=vocabulary)
    if not found:
        raise ConfigError(
            f"optimizer={config.optimizer!r}: the model has no matrix besides embeddings and heads; expected "
            "muon_params=[...] with the names of some, or another optimizer"
        )
    return found


def hidden_matrices(
    shapes: Mapping[str, Sequence[int]],
    *,
    stacks: bool,
    left_out: Collection[str] = (),
    vocabulary: int | None = None,
) -> Collection[str]:
    """Return the names of a model's hidden matrices by their names and shapes. Arguments are those of :func:`chosen`.

    Raises:
        ConfigError: the choice would leave every stack of matrices out, or take a matrix of a vocabulary.
    """
    tables = {name for name in shapes if is_table(name)}
    layers = set() if stacks else _of_layers(shapes)
    stacked = {name for name in layers if len(shapes[name]) == 3 and min(shapes[name][1:]) > 1}
    free = {name for name in shapes if name not in left_out and name not in tables}
    found = {
        name
        for name in free
        if name in stacked or (name not in layers and is_matrix(shapes[name], stacks=stacks) and not is_head(name))
    }
    if not stacks or not any(len(shapes[name]) > 2 for name in found):
        own = {name: tuple(shapes[name][1:]) if name in layers else tuple(shapes[name]) for name in shapes}
        maybe = [n for n in shapes if n in free - found and len(own[n]) == 3 and is_matrix(own[n], stacks=True)]
        _refuse([n for n in maybe if not _is_one_kernel(n, own)], shapes, found, _STACKS)
    matrices = {name: shapes[name] for name in shapes if name not in tables | layers and len(shapes[name]) > 1}
    widths = {min(shapes[name]) for name in shapes if name not in free and len(shapes[name]) == 2}
    size = _rows(shapes) if vocabulary is None else vocabulary
    root = _common(map(_parts, shapes))
    doubtful = [
        n
        for n in shapes
        if n in found - layers
        and (
            _is_vocabularys(n, matrices, found, size, widths, root=root)
            or (not stacks and _is_of_a_table(n, matrices, shapes, root=root))
        )
    ]
    _refuse(doubtful, shapes, found, _HEADS)
    if not stacks and not any(is_head(name) and len(shapes[name]) > 1 for name in shapes):
        _refuse([n for n in shapes if n in found - layers and _may_be_last(n, shapes, root=root)], shapes, found, _LAST)
    return found


_STACKS = "arrays of three dimensions may be stacks of matrices, and AdamW would update all of these"
_HEADS = "a dimension is as large as a vocabulary, as embeddings and heads have it, and Muon would update"

_LAST = (
    "no parameter has the name of a head, and a dimension of these may be the model's outputs, since no other matrix "
    "has it, and Muon would update"
)


def _refuse(unclear: Sequence[str], shapes: Mapping[str, Sequence[int]], found: Collection[str], why: str) -> None:
    """Raise :class:`ConfigError` with the names and shapes of parameters of which it is unclear if they are hidden
    matrices, and with the names that Muon would take beside them."""
    if unclear:
        which = ", ".join(f"{name!r} {tuple(shapes[name])}" for name in unclear[:8])
        more = f" and {len(unclear) - 8} more" if len(unclear) > 8 else ""
        rest = [name for name in shapes if name in found and name not in unclear]
        raise ConfigError(
            f"optimizer='muon': {why}: {which}{more}; expected muon_params=[...] with the name, or its last parts, of "
            "each parameter that Muon is to update (the last two dimensions are a matrix, those before them count "
            f"matrices). The others that it would update: {some_of(rest) or 'none'}"
        )


def _of_layers(shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the parameters of layers that are stacked along their first dimension, as ``lax.scan`` takes them.

    All parameters of such a part of the tree have the same first dimension. One of them has three dimensions, of which
    the first is the smallest, and one has two: a stack of vectors.
    """
    parts: dict[tuple[str, ...], list[str]] = {}
    for name in shapes:
        path = _parts(name)
        for end in range(len(path)):
            parts.setdefault(tuple(path[:end]), []).append(name)
    found: set[str] = set()
    for names in parts.values():
        own = [shapes[name] for name in names]
        has_vectors, is_one = any(len(shape) == 2 for shape in own), len({tuple(shape[:1]) for shape in own}) == 1
        if is_one and has_vectors and any(len(shape) == 3 and shape[0] == min(shape) for shape in own):
            found.update(names)
    return found


def _is_one_kernel(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """True if a parameter of three dimensions is by its name of a convolution, or has a bias beside it that has its
    last ones: a stack's has its first.

    Args:
        shapes: of layers that are stacked, those of one layer.
    """
    if any(map(_CONVOLUTION.fullmatch, map(_spelled, _parts(name)))):
        return True
    module, shape = _parts(name)[:-1], tuple(shapes[name])
    beside = [tuple(own) for other, own in shapes.items() if is_table(other) and _parts(other)[:-1] == module]
    return any(own and own == shape[-len(own) :] for own in beside)


def _rows(shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Return the rows of the largest table of a vocabulary by names; None: there is none."""
    tables = [name for name in shapes if len(shapes[name]) == 2 and is_table(name) and not _is_place(name)]
    return max((shapes[name][0] for name in tables if shapes[name][0] > shapes[name][1]), default=None)


def _is_place(name: str) -> bool:
    """True if a table is by its name one of positions, or of vectors of several layers."""
    return any(map(_PLACE.fullmatch, map(_spelled, _parts(name)))) or bool(
        _VECTOR.fullmatch(_spelled(_parts(name)[-1]))
    )


def _is_near(n: int, size: int) -> bool:
    """True if a dimension may be that of a vocabulary of this size, with rows for padding or without special ones."""
    return 15 * size <= 16 * n and 3 * n <= 4 * size


def _is_vocabularys(
    name: str,
    matrices: Mapping[str, Sequence[int]],
    found: Collection[str],
    size: int | None,
    widths: Collection[int],
    *,
    root: int,
) -> bool:
    """True if a matrix has a dimension about as large as a vocabulary, or far larger than all others, and it is no
    width of hidden layers: one of a matrix in a layer or of a square one, or one that a matrix beside it has at the
    other end.

    Args:
        matrices: the model's, without tables and stacks of layers.
        found: those of them that Muon would take.
        size: of the vocabulary, if it is known.
        widths: of embeddings.
        root: how many of their first parts all names have in common.
    """
    shape = tuple(matrices[name][-2:])
    n = max(shape)
    rest = [
        m for other in found if other in matrices for m in matrices[other][-2:] if not _is_near(max(m, n), min(m, n))
    ]
    far = n >= _LARGE and bool(rest) and n > _FAR * max(rest)
    if not (far or (size is not None and _is_near(n, size))) or n in widths:
        return False
    path = _parts(name)[root:]
    if _is_in_a_layer(path):
        return False
    for other, own in matrices.items():
        others = _parts(other)[root:]
        ends = tuple(own[-2:])
        is_beside = others[:1] == path[:1] or max(len(others), len(path)) <= 2
        if ends == (n, n) or (is_beside and ends[shape[0] == n] == n and not (far and ends == shape[::-1])):
            return False
    return True


def _is_in_a_layer(path: Sequence[str]) -> bool:
    """True if these parts of a name lead through one of the model's layers to a module there."""
    return any(part.isdigit() or _LAYER.fullmatch(_spelled(part)) for part in path[:-2])


def _is_of_a_table(
    name: str, matrices: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]], *, root: int
) -> bool:
    """True if a matrix has the dimensions of an embedding that has fewer rows than columns, in either order, and no
    other matrix has so many rows or columns."""
    shape, path = tuple(matrices[name][-2:]), _parts(name)[root:]
    if _is_in_a_layer(path):
        return False
    for table, of_table in shapes.items():
        if len(of_table) == 2 and of_table[0] < of_table[1] and is_table(table) and not _is_place(table):
            alike = (tuple(of_table), tuple(of_table[::-1]))
            others = [tuple(own[-2:]) for other, own in matrices.items() if other != name]
            if shape in alike and not any(of_table[0] in ends for ends in others if ends not in alike):
                return True
    return False


def _may_be_last(name: str, shapes: Mapping[str, Sequence[int]], *, root: int) -> bool:
    """True if a matrix outside of layers has a dimension that no other matrix has, and no bias says that it is one of
    inputs."""
    shape, path = tuple(shapes[name]), _parts(name)
    if len(shape) != 2 or shape[0] == shape[1] or _is_in_a_layer(path[root:]) or _HIDDEN.intersection(path):
        return False
    others = {n for other, own in shapes.items() if other != name and len(own) > 1 for n in own}
    biases = {own[0] for other, own in shapes.items() if len(own) == 1 and _parts(other)[:-1] == path[:-1]}
    ends = [n for n in shape if n not in others]
    return any(not biases or n in biases for n in ends)


def _common(paths: Iterable[Sequence[str]]) -> int:
    """Return how many of their first parts all paths have in common."""
    return sum(1 for _ in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


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
    """The parts of a path: ``"hidden.w"``, ``"['hidden']['w']"``, ``"hidden/w"`` and flax.nnx's
    ``"['hidden']['w'].value"`` have the same."""
    return re.findall(r"[^][.'\"/]+", name.removesuffix(".value") if name.endswith("'].value") else name)


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
