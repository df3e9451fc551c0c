"""Curves of time to first token over image tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

DRAWN = {
    "stock": "stock",
    "encoder only (ram)": "encoder only",
    "static 0.3 (ram)": "static 0.3",
    "dynamic 0.035 (ram)": "dynamic 0.035",
    "exact (ram)": "exact hit, memory",
    "exact (disk)": "exact hit, disk",
    "by hand": "by hand",
    "floor exact: forward": "floor: forward alone",
}


def draw(results: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draws the curves, where matplotlib is installed and there are two sizes or more.

    Args:
        results (sequence of `dict`): of `measure`.
        path (`Path`): the picture, `.png`.

    Returns:
        `bool`: whether there is a picture.
    """
    architectures = list(dict.fromkeys(result["architecture"] for result in results))
    if len(results) < 2:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(
        1, len(architectures), figsize=(5.6 * len(architectures), 4.2), squeeze=False, layout="constrained"
    )
    for axis, architecture in zip(axes[0], architectures):
        own = [result for result in results if result["architecture"] == architecture]
        for label, name in DRAWN.items():
            points = [
                (result["image_tokens"] * result["images"], result["variants"][label]["median_s"])
                for result in own
                if label in result["variants"]
            ]
            if points:
                axis.plot(*zip(*points), marker="o", markersize=3, label=name)
        axis.set(xscale="log", yscale="log", title=architecture, xlabel="image tokens", ylabel="TTFT, s")
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7)
    drawn.savefig(path, dpi=110)
    pyplot.close(drawn)
    return True
