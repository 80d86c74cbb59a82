"""Records of each step as plain numbers, for a file, TensorBoard, W&B, MLflow or a progress bar.

::

    log = StepLog("steps.jsonl", TensorBoard("runs/a"), ProgressBar(1000), engine=engine, total=1000)
    ...
    log(engine.step(), loss=loss, tokens=tokens.numel())

A record has the number of its update. A run that continues from a checkpoint repeats some updates; their earlier
records no longer count. A writer recognises this by a step number less than the last one.
"""

from .bar import ProgressBar
from .files import Csv, JsonLines
from .log import StepLog, numbers
from .trackers import MLflow, TensorBoard, WandB
from .writer import Writer

__all__ = ["Csv", "JsonLines", "MLflow", "ProgressBar", "StepLog", "TensorBoard", "WandB", "Writer", "numbers"]
