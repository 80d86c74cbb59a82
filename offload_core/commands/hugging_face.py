"""Shapes of a Hugging Face model, from its ``config.json``: transformers builds it, without memory for its weights."""

from pathlib import Path
from textwrap import shorten
from typing import Any

from ..dtypes import BFLOAT16, BY_NAME, ElementType
from ..errors import ConfigError
from ..plans.prediction import Blocks
from ..support.checks import shown
from ..support.optional import library


def configured_shapes(
    path: Path, config: dict[str, Any]
) -> tuple[dict[str, tuple[int, ...]], ElementType, Blocks | None]:
    """The parameters by name, tied ones once; their type: the configuration's, else bf16; and the model's blocks, or
    None if the configuration does not give their number and the hidden size.

    The model's class is transformers' own: no code that comes with a model is run.

    Args:
        path: the file that ``config`` was read from, for errors.

    Raises:
        ConfigError: transformers is missing, or cannot build such a model.
    """
    try:
        transformers = library("transformers", "transformers", f"--model {path}")
        torch = library("torch", "transformers", f"--model {path}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; or name a .safetensors file, which needs neither") from None
    try:
        settings = transformers.AutoConfig.for_model(**config)
        name = next(iter(config.get("architectures") or ()), None)
        own = getattr(transformers, str(name), None)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings) if own is None else own(settings)
    except Exception as error:  # a configuration of another version, or a forged one, may raise any error
        said = shorten(str(error), 120)
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} cannot build a {shown(str(config.get('model_type')))} "
            f"from it ({type(error).__name__}: {said}); expected the config.json of a model that it has"
        ) from None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    dtype = config.get("dtype", config.get("torch_dtype"))
    n, width = (getattr(settings, name, None) for name in ("num_hidden_layers", "hidden_size"))
    blocks = Blocks(n, width) if isinstance(n, int) and isinstance(width, int) else None
    return shapes, BY_NAME.get(dtype, BFLOAT16) if isinstance(dtype, str) else BFLOAT16, blocks
