"""Shapes of models, for planning memory before a model is built. They come from the configuration of a GPT, from the
header of safetensors files, from a Hugging Face configuration, or, if only a count is known, from a GPT of about that
size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint.safetensors import read_header
from ..checkpoint.weight_files import INDEX, files_of, json_object
from ..config.matrices import chosen
from ..config.options import OffloadConfig
from ..dtypes import BY_NUMPY, ElementType
from ..errors import CheckpointError
from ..layout.partition import ParamSpec
from ..layout.regions import InMemory
from ..plans.prediction import Blocks
from .hugging_face import configured_shapes

GPT2_VOCABULARY = 50304  # 50257 padded to a multiple of 64; bytes use the first 256
CONFIG = "config.json"
LEAST = 1_000_000
"""The fewest parameters that :func:`gpt_of` takes."""
MOST = 10**12
"""The most parameters that a plan takes."""
_HEAD = 128
"""Elements of an attention head, for models of which only a count is known."""

Shapes = Mapping[str, tuple[int, ...]]
"""Parameters by name, in the order of a forward."""


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT: pre-norm, biases, the embedding tied to the output layer."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int | None
    """Rows of GPT-2's learned position table; None: rotary positions, which need less training."""

    @property
    def shapes(self) -> Shapes:
        """The shapes of its parameters; the tied embedding is one parameter."""
        width = self.width
        table = {} if self.positions is None else {"position.weight": (self.positions, width)}
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (self.vocabulary, width), **table}
        linears = {
            "qkv": (3 * width, width),
            "attention_out": (width, width),
            "mlp_in": (4 * width, width),
            "mlp_out": (width, 4 * width),
        }
        block: dict[str, tuple[int, ...]] = {}
        for name in ("attention_norm", "qkv", "attention_out", "mlp_norm", "mlp_in", "mlp_out"):
            weight = linears.get(name, (width,))
            block |= {f"{name}.weight": weight, f"{name}.bias": weight[:1]}
        for layer in range(self.layers):
            shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
        return shapes | {"norm.weight": (width,), "norm.bias": (width,)}

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.layers, self.width)

    @property
    def numel(self) -> int:
        """Parameters, the tied embedding counted once."""
        return sum(map(math.prod, self.shapes.values()))


GPTS = {
    "tiny": GPTConfig(layers=2, width=128, heads=4, vocabulary=256, positions=None),
    "gpt2-124m": GPTConfig(layers=12, width=768, heads=12, vocabulary=GPT2_VOCABULARY, positions=1024),
    "gpt2-1.5b": GPTConfig(layers=48, width=1600, heads=25, vocabulary=GPT2_VOCABULARY, positions=1024),
    "gpt2-10b": GPTConfig(layers=50, width=4096, heads=32, vocabulary=GPT2_VOCABULARY, positions=1024),
}
"""The models of ``bench``, by their presets' names."""


def gpt_of(numel: int) -> GPTConfig:
    """A GPT of about ``numel`` parameters (at least :data:`LEAST`), with layers and width in the ratio of the nearest
    model of ``GPTS``. From ten million parameters on its size is within a tenth of ``numel``."""
    near = min(GPTS.values(), key=lambda gpt: abs(math.log(gpt.numel / numel)))
    wanted = near.width * (numel / near.numel) ** (1 / 3)
    width = max(_HEAD, _HEAD * round(wanted / _HEAD))

    def of(layers: int, vocabulary: int) -> GPTConfig:
        return GPTConfig(layers, width, width // _HEAD, vocabulary, near.positions)

    vocabulary = min(near.vocabulary, max(1, numel // (4 * width)))  # else it would be most of a small model
    ends, two = of(1, vocabulary).numel, of(2, vocabulary).numel
    return of(max(1, round(1 + (numel - ends) / (two - ends))), vocabulary)


Stored = tuple[Shapes, ElementType | dict[str, ElementType], Blocks | None]
"""The parameters of a model in files, their element types, and its blocks (None: unknown)."""


def shapes_of(path: Path) -> Stored:
    """The parameters of a model in files, their element types, and its blocks: of a ``.safetensors`` file, an index of
    several or a Hugging Face ``config.json``, or of a folder that holds one of these, in this order. The blocks are
    known of a ``config.json`` alone.

    Raises:
        CheckpointError: there is no such file, or it is cut off or holds no parameters.
        ConfigError: it is a configuration of which no model can be built here.
        OSError: a file cannot be read.
    """
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file or folder here; expected a path. For a model on a hub, download its {CONFIG} "
            "first, and give the path of that file"
        )
    if path.is_dir():
        stored = [path / INDEX] if (path / INDEX).exists() else sorted(path.glob("*.safetensors"))
        if not stored and not (path / CONFIG).exists():
            raise CheckpointError(f"{path}: holds neither {INDEX}, nor a .safetensors file, nor {CONFIG}")
        path = stored[0] if len(stored) == 1 else path if stored else path / CONFIG
        if len(stored) > 1:
            return _stored_shapes(path, stored)
    if path.suffix != ".json":
        return _stored_shapes(path, [path])
    content = json_object(path, f"no index of safetensors files and no {CONFIG}")
    if "weight_map" in content:
        return _stored_shapes(path, files_of(path, content))
    if "model_type" not in content:
        raise CheckpointError(f"{path}: no index of safetensors files (weight_map) and no {CONFIG} (model_type)")
    return configured_shapes(path, content)


def _stored_shapes(path: Path, files: Sequence[Path]) -> Stored:
    stored = {name: tensor for file in files for name, tensor in read_header(file).items()}
    tensors = {name: tensor for name, tensor in stored.items() if tensor.dtype in BY_NUMPY}
    if not tensors:
        raise CheckpointError(f"{path}: holds no float32, bfloat16 or float16 tensor")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return shapes, {name: BY_NUMPY[tensor.dtype] for name, tensor in tensors.items()}, None


def specs_of(
    shapes: Shapes, dtypes: ElementType | Mapping[str, ElementType], config: OffloadConfig, world_size: int
) -> list[ParamSpec]:
    """The parameters as torch's front end gives them to the core, of ``param_dtype`` if that is set."""
    least = max(config.param_persistence_threshold, 1)
    in_shards = config.takes_apart(world_size)

    def spec(name: str, shape: tuple[int, ...]) -> ParamSpec:
        own = dtypes if isinstance(dtypes, ElementType) else dtypes[name]
        numel = math.prod(shape)
        dtype = config.target_dtype or own
        return ParamSpec(name, numel, dtype, elements=InMemory(shape), partitioned=in_shards and numel >= least)

    return with_rules([spec(name, shape) for name, shape in shapes.items()], shapes, config, stacks=True)


def with_rules(specs: Sequence[ParamSpec], shapes: Shapes, config: OffloadConfig, *, stacks: bool) -> list[ParamSpec]:
    """Return the parameters with their rules, as ``wrap`` chooses them by names and shapes.

    Args:
        stacks: True if parameters of three dimensions are stacks of matrices.
    """
    names, rules = chosen(config, shapes, stacks=stacks), [config.rule(group) for group in config.groups()]
    numbers = [int(names is not None and spec.name not in names) for spec in specs]
    return [
        replace(spec, group=n, rule=rules[n], matrix=rules[n].matrix(spec.name, shapes[spec.name]))
        for n, spec in zip(numbers, specs, strict=True)
    ]
