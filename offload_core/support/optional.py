"""Libraries that only some users need."""

import importlib
from typing import Any


def library(module: str, extra: str, purpose: str) -> Any:
    """Import and return a module.

    Raises:
        ModuleNotFoundError: it is not installed; the message names the extra of ``offload-core`` that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{purpose} needs {error.name}, which is not installed; expected it: pip install 'offload-core[{extra}]'",
            name=error.name,
        ) from None
