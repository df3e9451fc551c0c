"""Numbers with their uncertainty, and distances between answers. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

Z95 = 1.959963984540054


def wilson(right: float, count: int, z: float = Z95) -> tuple[float, float]:
    """The Wilson score interval of a share.

    Args:
        right (`float`): successes; a mean over repeated answers to a question may be broken.
        count (`int`): trials.
        z (`float`, *optional*): quantile of the normal distribution, by default that of 95 %.
    """
    if count == 0:
        return 0.0, 1.0
    share, square = right / count, z * z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = z * sqrt(share * (1 - share) / count + square / (4 * count * count)) / (1 + square / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(values: Sequence[float] | np.ndarray, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of a mean. Of paired differences: the paired bootstrap.

    Args:
        values (sequence of `float`): one for each question.
        draws (`int`, *optional*, defaults to 2000): resamples.
        seed (`int`, *optional*, defaults to 0): of the resamples.
    """
    found = np.asarray(values, dtype=np.float64)
    if found.size == 0:
        return 0.0, 0.0
    rng = np.random.default_rng(seed)
    means = [found[rng.integers(found.size, size=found.size)].mean() for _ in range(draws)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def kl(true: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence, in nats, of the distributions that logits stand for.

    Args:
        true (`np.ndarray` of shape `(n, vocabulary)`): logits of the full computation.
        other (`np.ndarray` of the same shape): logits behind a reuse.

    Returns:
        `np.ndarray` of shape `(n,)`.
    """
    p, q = log_softmax(true), log_softmax(other)
    return np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logarithms of probabilities over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def auc(scores: Sequence[float] | np.ndarray, harmful: Sequence[bool] | np.ndarray) -> float:
    """Area under the ROC curve: how often a harmful case has the larger score. `nan` where one class is empty."""
    found, bad = np.asarray(scores, dtype=np.float64), np.asarray(harmful, dtype=bool)
    positives, negatives = int(bad.sum()), int((~bad).sum())
    if not positives or not negatives:
        return float("nan")
    values, index, counts = np.unique(found, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[index]
    return float((ranks[bad].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def rates(scores: np.ndarray, harmful: np.ndarray, threshold: float) -> tuple[float, float]:
    """Shares of harmful and of harmless cases above a threshold; `nan` for an empty class."""
    above = scores > threshold
    return tuple(float(above[side].mean()) if side.any() else float("nan") for side in (harmful, ~harmful))  # type: ignore[return-value]


def best_threshold(scores: Sequence[float] | np.ndarray, harmful: Sequence[bool] | np.ndarray) -> float:
    """The threshold between two scores with the largest share of harmful minus share of harmless cases above it.

    Of equally good ones the middle of the widest gap. Infinite where nothing is harmful.
    """
    found, bad = np.asarray(scores, dtype=np.float64), np.asarray(harmful, dtype=bool)
    if not bad.any():
        return float("inf")
    if bad.all():
        return 0.0
    values = np.unique(found)
    edges = np.concatenate([[0.0], values])
    caught = np.array([(found[bad] > edge).mean() - (found[~bad] > edge).mean() for edge in edges])
    above = np.append(edges[1:], edges[-1])  # a threshold may stand anywhere up to the next score
    best = np.flatnonzero(caught >= caught.max() - 1e-12)
    widest = best[np.argmax(above[best] - edges[best])]
    return float((edges[widest] + above[widest]) / 2)
