"""Libraries that only some users need."""

import importlib
from typing import Any


def library(module: str, extra: str | None, purpose: str) -> Any:
    """Import and return a module.

    Args:
        extra: the extra of ``offload-core`` that installs it; None: none does, and the package has the module's name.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module if extra is None else f"'offload-core[{extra}]'"
        raise ModuleNotFoundError(
            f"{purpose} needs {error.name}, which is not installed; expected it: pip install {package}",
            name=error.name,
        ) from None
