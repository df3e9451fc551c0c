"""Which tokens of a reused image are recomputed: VLCache's choice, and those of its peers for comparison.

A policy is asked for nested token sets, one per layer, of the sizes that the recompute schedule gives. Those that look
at the model's values first ("selective") compute all tokens in the first layers, which counts as recompute.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Protocol, runtime_checkable

from .plan import Runs, merged_neighbours


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

    def __post_init__(self) -> None:
        if self.by not in ("kv", "attention"):
            raise ValueError(f'`by` must be "kv" or "attention", got {self.by!r}.')
        if not isinstance(self.layer, int) or self.layer < 1:
            raise ValueError(f"`layer` must be a layer from 1 on, got {self.layer!r}: in layer 0 nothing differs.")

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


def checked_runs(policy: RecomputePolicy, counts: Sequence[int], length: int) -> tuple[Runs, ...]:
    """What a policy chooses, if it keeps to the rules.

    Args:
        policy (`RecomputePolicy`): the policy, which may be a user's.
        counts (sequence of `int`): tokens to recompute at each layer, non-increasing.
        length (`int`): tokens of the image, T.

    Raises:
        `ValueError`: its runs are not what `RecomputePolicy.runs` promises.
    """
    chosen = policy.runs(counts, length)

    def wrong(what: str) -> ValueError:
        return ValueError(f"`policy` {policy!r} chose wrong tokens of an image of {length} tokens: {what}.")

    try:
        layers = [[(index(a), index(b)) for a, b in layer] for layer in chosen]
    except (TypeError, ValueError):
        raise wrong(f"its `runs` must return runs (a, b) of tokens for every layer, got {chosen!r}") from None
    if len(layers) != len(counts):
        raise wrong(f"runs of {len(layers)} layers where the model has {len(counts)}")
    known: dict[tuple[Runs, Runs], Runs] = {}
    checked: list[Runs] = []
    below: Runs = ((0, length),)
    for number, layer in enumerate(layers):
        pair = (tuple(layer), below)
        if pair not in known:
            if any(a > b for a, b in layer) or any(b > c for (_, b), (c, _) in zip(layer, layer[1:])):
                raise wrong(f"layer {number} has {layer}, which are not sorted and disjoint")
            merged = merged_neighbours(layer)
            if not all(any(low <= a and b <= high for low, high in below) for a, b in merged):
                where = f"{list(below)} of the layer below" if number else f"{list(below)}"
                raise wrong(f"layer {number} has {layer}, which is not within {where}")
            known[pair] = tuple(merged)
        below = known[pair]
        checked.append(below)
    return tuple(checked)


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
