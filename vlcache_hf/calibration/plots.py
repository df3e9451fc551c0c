"""Pictures of curves and schedules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .result import CalibrationResult


def plot(result: CalibrationResult, folder: str | os.PathLike[str]) -> list[Path]:
    """Draws `curves.png` (the paper's Figure 3) and `schedules.png`.

    Args:
        result (`CalibrationResult`): what to draw.
        folder (`str` or `os.PathLike`): created when missing.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib, which is not installed: pip install 'vlcache-hf[plots]'.") from error
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw in (("curves.png", _curves), ("schedules.png", _schedules)):
        figure: Any = Figure(figsize=(7, 4.5), layout="constrained")  # not pyplot: no window system, no global state
        draw(figure.add_subplot(), result)
        figure.savefig(path / name, dpi=150)
        drawn.append(path / name)
    return drawn


def _curves(axes: Any, result: CalibrationResult) -> None:
    from matplotlib import colormaps

    curves = result.curves
    layers = len(curves.mean)
    for layer in range(layers):
        color = colormaps["viridis"](layer / max(layers - 1, 1))
        labelled = layers <= 12 or layer % (layers // 6) == 0
        axes.plot(curves.ratios, curves.mean[layer], color=color, label=f"layer {layer}" if labelled else None)
    axes.set(xlabel="ratio recomputed in this layer alone", ylabel="MSE of the answer's logits")
    axes.legend(fontsize="small", ncols=2)


def _schedules(axes: Any, result: CalibrationResult) -> None:
    for number, part in enumerate(result.budgets):
        for name, schedule in part.candidates.items():
            if name != "uniform":
                chosen = schedule is part.schedule
                axes.step(
                    range(schedule.num_layers),
                    schedule.ratios,
                    where="mid",
                    color=f"C{number}",
                    linestyle={"greedy": ":", "optimal": "--"}.get(name, "-"),
                    linewidth=2 if chosen else 1,
                    label=f"{part.budget:g} {name}",
                )
    axes.set(xlabel="layer", ylabel="ratio", ylim=(0, None))
    axes.legend(fontsize="small")
