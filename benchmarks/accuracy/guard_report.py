"""Tables and plot of the guard experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlcache_hf.audit import calibrated_threshold

from .metrics import auc, best_threshold, bootstrap, rates
from .report import figure, percent, save, table
from .signals import Signal

HARMFUL_KL = 0.1
MARGIN = 0.01  # of accuracy, that a threshold may lose on the calibration half
BEST_SHOWN = 12
Cases = dict[str, dict[str, list[dict[str, Any]]]]


@dataclass(frozen=True)
class Part:
    """One table: its name in the JSON, what stands there, and the text."""

    name: str
    data: Any
    text: str


def harmful(cases: Sequence[dict[str, Any]]) -> np.ndarray:
    """Where reuse changed the answer, or the distribution of its first token by more than `HARMFUL_KL`."""
    return np.array([bool(case["flip"]) or case["kl"] > HARMFUL_KL for case in cases], dtype=bool)


def values(cases: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([case[key] for case in cases], dtype=np.float64)


def choose(cases: Sequence[dict[str, Any]]) -> float:
    """The threshold of the guard's present signal."""
    return best_threshold(values(cases, "deviation"), harmful(cases))


def cheapest(cases: Cases, signal: Signal | None) -> float:
    """The highest threshold at which no model loses more than `MARGIN` of accuracy on the calibration half.

    Args:
        cases (`dict`): by model.
        signal (`Signal`, *optional*): what is looked at; `None` for what the guard itself has seen.
    """
    sides = [found["calibration"] for found in cases.values()]
    scores = [values(side, "deviation") if signal is None else seen(side, signal) for side in sides]
    for limit in np.unique(np.quantile(np.concatenate(scores), np.linspace(0, 1, 401)))[::-1]:
        losses = [
            (values(side, "full") - np.where(found > limit, values(side, "full"), values(side, "guarded"))).mean()
            for side, found in zip(sides, scores, strict=True)
        ]
        if max(losses) <= MARGIN:
            return float(limit)
    return 0.0


def all_have(cases: Cases, name: str) -> bool:
    """Whether a signal was noted of every case; models of other depths have other signals."""
    return all(name in case["signals"] for sides in cases.values() for side in sides.values() for case in side)


def seen(side: Sequence[dict[str, Any]], signal: Signal) -> np.ndarray:
    """A signal of every case."""
    return np.array([case["signals"][signal.name] for case in side], dtype=np.float64)


def distribution(cases: Cases) -> Part:
    """Deviations for each model, layout and context change."""
    lines, data = [], []
    for model, sides in cases.items():
        both = sides["calibration"] + sides["test"]
        for key in dict.fromkeys((case["group"], case["context"]) for case in both):
            part = [case for case in both if (case["group"], case["context"]) == key]
            low, middle, high = np.percentile(values(part, "deviation"), [5, 50, 95])
            bad, flips, distance = harmful(part).mean(), values(part, "flip").mean(), values(part, "kl").mean()
            data.append(
                {"model": model, "layout": key[0], "context": key[1], "n": len(part), "deviation": [low, middle, high]}
                | {"flips": float(flips), "kl": float(distance), "harmful": float(bad)}
            )
            numbers = [f"{low:.3f}", f"{middle:.3f}", f"{high:.3f}", percent(flips), f"{distance:.3f}", percent(bad)]
            lines.append([f"{model} / {key[0]} / {key[1]}", str(len(part)), *numbers])
    columns = ["model / question / context change", "n", "dev 5 %", "median", "95 %", "flips %", "KL", "harmful %"]
    return Part("distribution", data, table("Deviation that the guard sees, and what reuse does", columns, lines))


def signal_table(cases: Cases, signals: Sequence[Signal]) -> Part:
    """How well different signals tell harmful from harmless, thresholds chosen on the calibration half."""
    train = [case for sides in cases.values() for case in sides["calibration"]]
    test = [case for sides in cases.values() for case in sides["test"]]
    bad = harmful(test)
    data: dict[str, dict[str, float]] = {}
    for signal in signals:
        threshold = best_threshold(seen(train, signal), harmful(train))
        caught, alarmed = rates(seen(test, signal), bad, threshold)
        row = data[signal.name] = {"auc": auc(seen(test, signal), bad), "threshold": threshold}
        row |= {"caught": caught, "false alarms": alarmed, "cheapest": cheapest(cases, signal)}
        for model, sides in cases.items():
            own, full = seen(sides["test"], signal), values(sides["test"], "full")
            above = own > row["cheapest"]
            row[f"auc {model}"] = auc(own, harmful(sides["test"]))
            row[f"to full {model}"] = float((np.where(above, full, values(sides["test"], "guarded")) - full).mean())
            row[f"escalated {model}"] = float(above.mean())
    order = sorted(data, key=lambda name: -np.nan_to_num(data[name]["auc"]))
    lines = []
    for name in [name for name in order if name in order[:BEST_SHOWN] or name == signals[0].name]:
        row = data[name]
        lines.append([name + (" (present)" if name == signals[0].name else "")])
        lines[-1] += [f"{row[key]:.3f}" for key in ("auc", *(f"auc {model}" for model in cases), "threshold")]
        lines[-1] += [percent(row["caught"]), percent(row["false alarms"])]
        for model in cases:
            lines[-1] += [f"{100 * row[f'to full {model}']:+.1f}", percent(row[f"escalated {model}"])]
    columns = ["signal", "AUC", *(f"AUC {model}" for model in cases), "threshold", "caught %", "false alarms %"]
    columns += [column for model in cases for column in (f"{model} to full", "escalated %")]
    title = (
        f"Signals on the test half, {int(bad.sum())} harmful of {len(bad)}: the threshold that separates best, and\n"
        f"what must be escalated to lose at most {100 * MARGIN:g} points of accuracy on the calibration half; "
        f"the best {BEST_SHOWN} of {len(order)} and the present one"
    )
    return Part("signals", data, table(title, columns, lines))


def costs(side: Sequence[dict[str, Any]], signal: Signal, layers: int, ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Computed share of every case where a guard with this signal stays quiet, and where it escalates."""
    found = [signal.shares(case["tokens"], case["text"], layers, int(ratio * case["tokens"] + 1e-9)) for case in side]
    quiet, escalated = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return quiet, escalated


def best_signal(cases: Cases, signals: Sequence[Signal], layers: dict[str, int], ratio: float) -> Signal:
    """The signal with which least is computed on the calibration half at its `cheapest` threshold."""

    def computed(signal: Signal) -> float:
        limit, total = cheapest(cases, signal), 0.0
        for model, sides in cases.items():
            quiet, escalated = costs(sides["calibration"], signal, layers[model], ratio)
            total += float(np.where(seen(sides["calibration"], signal) > limit, escalated, quiet).mean())
        return total

    return min(signals, key=computed)


def calibrated(sides: dict[str, list[dict[str, Any]]]) -> float:
    """The threshold of one model, from its calibration half: the highest that lets at most `MARGIN` of all answers
    become wrong."""
    side = sides["calibration"]
    lost = values(side, "full") > values(side, "guarded")
    return calibrated_threshold(list(values(side, "deviation")), list(lost), MARGIN)


def evaluation(cases: Cases, best: Signal, layers: dict[str, int], ratio: float, threshold: float) -> Part:
    """Accuracy and cost on the test half: of the present guard, and of one that looks at the best signal instead."""
    lines: list[list[str]] = []
    data: list[dict[str, Any]] = []
    train = [case for sides in cases.values() for case in sides["calibration"]]
    separating = best_threshold(seen(train, best), harmful(train))
    for model, sides in cases.items():
        test = sides["test"]
        full = values(test, "full")
        present = [values(test, key) for key in ("deviation", "guarded share", "escalated share")]
        other = [seen(test, best), *costs(test, best, layers[model], ratio)]
        rows = [
            ("no guard", np.inf, [full * 0, values(test, "plain share"), full]),
            ("guard", threshold, present),
            ("guard, calibrated", calibrated(sides), present),
            ("guard, cheapest", cheapest(cases, None), present),
            ("best signal", separating, other),
            ("best signal, cheapest", cheapest(cases, best), other),
        ]
        for name, limit, (scores, calm, alarm) in rows:
            above = scores > limit
            right = np.where(above, full, values(test, "plain" if name == "no guard" else "guarded"))
            low, high = bootstrap(right - full)
            row = {"accuracy": right.mean(), "full": full.mean(), "to_full": (right - full).mean()}
            row |= {"computed": np.where(above, alarm, calm).mean(), "escalated": above.mean()}
            row = {key: float(value) for key, value in row.items()}
            data.append(
                {"model": model, "guard": name, "threshold": limit, "n": len(test), "to_full_95": [low, high]} | row
            )
            lines.append([f"{model}, {name}", "-" if np.isinf(limit) else f"{limit:.3f}", percent(row["accuracy"])])
            lines[-1] += [percent(row["full"]), f"{100 * row['to_full']:+.1f}", f"{100 * low:+.1f}..{100 * high:+.1f}"]
            lines[-1] += [percent(row["computed"]), percent(row["escalated"])]
    columns = ["", "threshold", "accuracy", "full", "to full", "95 %", "computed %", "escalated %"]
    title = (
        "The guard on the test half. Computed: image tokens times layers, all that was abandoned included.\n"
        f"Best signal, that with which least is computed on the calibration half: {best.name}"
    )
    return Part("evaluation", {"best": best.name, "rows": data}, table(title, columns, lines))


def singles_table(found: dict[str, list[dict[str, Any]]]) -> Part:
    """The real guard, one request at a time."""
    lines = []
    for model, rows in found.items():
        means = {key: float(values(rows, key).mean()) for key in rows[0]}
        lines.append(
            [model, str(len(rows)), *(percent(means[key]) for key in ("full", "plain", "right", "escalated"))]
        )
        lines[-1] += [percent(means[key]) for key in ("share", "expected share", "expected")]
    columns = ["model", "n", "full", "no guard", "guard", "escalated %", "computed %", "expected %", "as expected %"]
    return Part("one by one", found, table('One by one with guard="escalate"', columns, lines))


def plot(cases: Cases, best: Signal, threshold: float, folder: Path, name: str) -> None:
    """For each model: what the guard sees against harm, the same for the best signal, and the ROC curves of both."""
    drawn, axes = figure(3, len(cases), width=5)
    for column, (model, sides) in enumerate(cases.items()):
        both = sides["calibration"] + sides["test"]
        contexts = np.array([case["context"] for case in both])
        distance = np.maximum(values(both, "kl"), 1e-7)
        for row, (label, scores) in enumerate([("guard", values(both, "deviation")), (best.name, seen(both, best))]):
            for context in dict.fromkeys(contexts):
                part = contexts == context
                axes[row][column].scatter(scores[part], distance[part], s=3, alpha=0.4, label=context)
            axes[row][column].set(yscale="log", xlabel=f"deviation: {label}", ylabel="KL to full", title=model)
            points = np.array([rates(scores, harmful(both), edge) for edge in np.append(-1.0, np.unique(scores))])
            axes[2][column].plot(points[:, 1], points[:, 0], label=label)
        axes[0][column].axvline(threshold, color="black", linewidth=0.8)
        axes[2][column].set(
            xlabel="harmless above threshold", ylabel="harmful above threshold", xlim=(0, 1), ylim=(0, 1)
        )
        axes[2][column].legend(fontsize=7)
    axes[0][0].legend(fontsize=7, markerscale=3)
    save(drawn, folder, name)
