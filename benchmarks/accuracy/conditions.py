"""The rows of the tables: what is recomputed of a picture that is met in another context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlcache_hf import RecomputeSchedule
from vlcache_hf.policies import FirstTokens

RATIOS = (0.1, 0.2, 0.3)
BUDGETS = (0.025, 0.035, 0.05, 0.1)
PEERS = ("suffix", "random", "cacheblend", "kvshare")
HIGHEST = 0.3  # the largest ratio that the paper's search tries


@dataclass(frozen=True)
class Condition:
    """One row.

    Args:
        name (`str`): of the row.
        policy (`str`): what it is a point of; points of one policy are joined in the plot.
        settings (`dict`): of the `VLCache`.
        kind (`str`): what every picture must be: `"reused"`, `"exact"`, `"miss"`, `"escalated"` (reused, or computed
            in full by the guard); `"stock"` is the stock model.
    """

    name: str
    policy: str
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = "reused"


def front_loaded(budget: float, layers: int) -> RecomputeSchedule:
    """A schedule for a model that nobody has calibrated: ratios fall with the cube of the share of layers to come.

    Args:
        budget (`float`): mean ratio.
        layers (`int`): decoder layers.
    """
    weights = [(1 - layer / layers) ** 3 for layer in range(layers)]
    scale = budget * layers / sum(weights)
    capped = [min(HIGHEST, scale * weight) for weight in weights]
    while sum(capped) < budget * layers - 1e-9 and capped[-1] < HIGHEST - 1e-9:  # the cap took something away
        scale *= 1.01
        capped = [min(HIGHEST, scale * weight) for weight in weights]
    return RecomputeSchedule(tuple(capped), method={"prior": "front-loaded, cubic", "budget": budget})


def conditions(
    layers: int, schedules: Sequence[Path] = (), names: Sequence[str] = (), guard_threshold: float | None = None
) -> list[Condition]:
    """All rows, the full computation first.

    Args:
        layers (`int`): decoder layers of the model.
        schedules (sequence of `Path`, *optional*): calibrated schedules; without them those of the prior are used.
        names (sequence of `str`, *optional*): only rows whose name starts with one of these.
        guard_threshold (`float`, *optional*): other than that of `VLCacheConfig`.
    """
    dynamic = [(f"calibrated {path.stem}", RecomputeSchedule.from_pretrained(path)) for path in schedules]
    dynamic = dynamic or [(f"front-loaded {budget:g}", front_loaded(budget, layers)) for budget in BUDGETS]
    found = [
        Condition("full (stock)", "prefix", {}, "stock"),
        Condition("exact hit", "exact", {}, "exact"),
        Condition("encoder only", "encoder only", {"policy": "encoder_only"}, "miss"),
        Condition("all by reuse", "prefix", {"policy": "full", "schedule": 0.0}),
        Condition("none (r = 0)", "prefix", {"policy": "none", "schedule": 0.0}),
        *(Condition(name, "scheduled", {"schedule": schedule}) for name, schedule in dynamic),
        *(Condition(f"prefix {ratio:g}", "prefix", {"schedule": ratio}) for ratio in RATIOS),
    ]
    guarded = {"schedule": 0.1, "guard": "escalate", "guard_threshold": guard_threshold}
    found.append(Condition("guard, prefix 0.1", "guard", guarded, "escalated"))
    for policy in PEERS:
        found += [Condition(f"{policy} {ratio:g}", policy, {"policy": policy, "schedule": ratio}) for ratio in RATIOS]
    found += [
        Condition(f"epic/mpic {tokens} tokens", "epic/mpic", {"policy": FirstTokens(tokens), "schedule": 0.0})
        for tokens in (8, 32)
    ]
    kept = [one for one in found if not names or any(one.name.startswith(name) for name in names)]
    return kept if found[0] in kept else [found[0], *kept]
