"""The tests; where torch's fused AdamW is not the definition, they compare with that."""

import importlib.util

from tests.support import fused_adam

if fused_adam.rounds_apart() and importlib.util.find_spec("torch") is not None:
    fused_adam.follow_the_definition()
