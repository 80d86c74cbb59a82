"""A curve as text, for a terminal."""

from collections.abc import Sequence

import numpy as np


def curve(values: Sequence[float], width: int = 72, height: int = 10, mark: str = "•") -> str:
    """``values`` from left to right, in ``width`` columns at most: a column shows the mean of its share of them.

    Values that are not finite are left out; without any that is, there is no picture (``""``).
    """
    columns = [column[np.isfinite(column)] for column in np.array_split(np.array(values, float), width)]
    means = np.array([column.mean() for column in columns if column.size])
    if not means.size:
        return ""
    low, high = means.min(), means.max()
    rows = np.rint((high - means) / ((high - low) or 1) * (height - 1)).astype(int)
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = []
    for row in range(height):
        marks = "".join(mark if at == row else " " for at in rows)
        lines.append(f"{labels.get(row, ''):>8} |{marks}".rstrip())
    return "\n".join([*lines, f"{'':8} +{'-' * len(means)}"])
