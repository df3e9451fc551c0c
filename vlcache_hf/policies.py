"""Which tokens of a reused image are recomputed: VLCache's choice, and those of its peers for comparison.

A policy is asked for nested token sets, one per layer, of the sizes that the recompute schedule gives. Those that look
at the model's values first ("selective") compute all tokens in the first layers, which counts as recompute.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .plan import Runs


@runtime_checkable
class RecomputePolicy(Protocol):
    """Chooses the tokens of a reused image that each layer recomputes."""

    def runs(self, counts: Sequence[int], length: int) -> tuple[Runs, ...]:
        """Sorted, disjoint runs `[a, b)` of tokens per layer, each layer's set within that of the layer before.

        Args:
            counts (sequence of `int`): tokens to recompute at each layer, non-increasing.
            length (`int`): tokens of the image, T.
        """
        ...


@dataclass(frozen=True)
class Prefix:
    """The first tokens: errors of early tokens reach all later ones (VLCache, paper sections 3.1 and 4.1)."""

    def runs(self, counts: Sequence[int], length: int) -> tuple[Runs, ...]:
        return tuple(((0, count),) if count else () for count in counts)


@dataclass(frozen=True)
class Suffix:
    """The last tokens (the comparison of the paper's appendix A.1)."""

    def runs(self, counts: Sequence[int], length: int) -> tuple[Runs, ...]:
        return tuple(((length - count, length),) if count else () for count in counts)


@dataclass(frozen=True)
class Random:
    """Tokens drawn at random, the same for all images of a size.

    Args:
        seed (`int`, *optional*, defaults to 0): of the draw.
    """

    seed: int = 0

    def runs(self, counts: Sequence[int], length: int) -> tuple[Runs, ...]:
        order = list(range(length))
        random.Random(self.seed).shuffle(order)
        return nested_runs(order, counts)


@dataclass(frozen=True)
class FirstTokens:
    """A fixed number of first tokens at every layer, whatever schedule and image size (EPIC's AttnLink, MPIC).

    Args:
        tokens (`int`, *optional*, defaults to 32): how many.
    """

    tokens: int = 32

    def runs(self, counts: Sequence[int], length: int) -> tuple[Runs, ...]:
        return Prefix().runs([min(self.tokens, length)] * len(counts), length)


@dataclass(frozen=True)
class Nothing:
    """No token: reuse as it is, whatever the schedule."""

    def runs(self, counts: Sequence[int], length: int) -> tuple[Runs, ...]:
        return ((),) * len(counts)


@dataclass(frozen=True)
class Everything:
    """All tokens: the full computation by way of the reuse, features taken from the store."""

    def runs(self, counts: Sequence[int], length: int) -> tuple[Runs, ...]:
        return (((0, length),),) * len(counts)


@dataclass(frozen=True)
class EncoderOnly:
    """No stored KV at all, also in the same context: the vision tower is skipped, the language model computes
    everything (the paper's "w/o ViT")."""

    def runs(self, counts: Sequence[int], length: int) -> tuple[Runs, ...]:
        return Everything().runs(counts, length)


@dataclass(frozen=True)
class LargestDeviation:
    """The tokens whose values differ most between this context and the stored one, found at one of the first layers.

    Up to that layer all tokens are computed. Only layers from 1 on differ at all: keys and values of layer 0 depend on
    pixels alone.

    Args:
        by (`str`): `"kv"` compares keys and values (CacheBlend), `"attention"` the output of attention over true
            against stored keys and values (KVShare).
        layer (`int`, *optional*, defaults to 1): where they are compared, from 1.
    """

    by: str
    layer: int = 1

    def runs(self, counts: Sequence[int], length: int) -> tuple[Runs, ...]:
        """What is computed as long as nothing is known: everything. See `chosen`."""
        return Everything().runs(counts, length)

    def chosen(self, scores: Sequence[float], counts: Sequence[int]) -> tuple[Runs, ...]:
        """The runs per layer once every token has a score.

        Args:
            scores (sequence of `float`): one per token; the largest are recomputed.
            counts (sequence of `int`): tokens to recompute at each layer, non-increasing.
        """
        length = len(scores)
        order = sorted(range(length), key=lambda token: (-scores[token], token))
        full = min(self.layer + 1, len(counts))
        return (((0, length),),) * full + nested_runs(order, counts[full:])


def nested_runs(order: Sequence[int], counts: Sequence[int]) -> tuple[Runs, ...]:
    """Runs per layer of the first `counts[l]` tokens of an order.

    Args:
        order (sequence of `int`): all tokens, most important first.
        counts (sequence of `int`): tokens of each layer, non-increasing.
    """
    known = {count: merged_runs(order[:count]) for count in set(counts)}
    return tuple(known[count] for count in counts)


def merged_runs(tokens: Iterable[int]) -> Runs:
    """The runs of a set of tokens.

    Args:
        tokens (iterable of `int`): distinct tokens, in any order.
    """
    runs: list[tuple[int, int]] = []
    for token in sorted(tokens):
        if runs and runs[-1][1] == token:
            runs[-1] = (runs[-1][0], token + 1)
        else:
            runs.append((token, token + 1))
    return tuple(runs)


POLICIES: dict[str, Callable[[], RecomputePolicy]] = {
    "prefix": Prefix,
    "suffix": Suffix,
    "random": Random,
    "none": Nothing,
    "full": Everything,
    "encoder_only": EncoderOnly,
    "epic": FirstTokens,
    "mpic": FirstTokens,
    "cacheblend": lambda: LargestDeviation("kv"),
    "kvshare": lambda: LargestDeviation("attention"),
}


def resolve_policy(policy: str | RecomputePolicy) -> RecomputePolicy:
    """The policy meant by a setting.

    Args:
        policy (`str` or `RecomputePolicy`): a name in `POLICIES`, or a policy with settings of its own.

    Raises:
        `ValueError`: there is no such policy.
    """
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    if not isinstance(policy, (str, type)) and isinstance(policy, RecomputePolicy):
        return policy
    raise ValueError(
        f"`policy` must be one of {', '.join(map(repr, POLICIES))}, or an object with their method `runs`, "
        f"got {policy!r}."
    )
