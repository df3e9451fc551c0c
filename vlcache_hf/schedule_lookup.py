"""From the `schedule` setting to the schedule of a model."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, metadata_load, try_to_load_from_cache

from .schedule import RecomputeSchedule
from .schedule_hub import (
    SCHEDULE_NAME,
    cached_repo_id,
    is_hub_id,
    loaded_commit,
    peek,
    shipped_file,
    shipped_schedules,
)

logger = logging.getLogger(__name__)

DEFAULT_RATIO = 0.1


@dataclass(frozen=True)
class ModelFacts:
    """What a schedule is looked up by.

    Args:
        name (`str`): what was passed to `from_pretrained`: a Hub id, a folder, or `""`.
        num_layers (`int`): number of decoder layers.
        model_type (`str`, *optional*): `config.model_type`.
        hidden_size (`int`, *optional*): width of the decoder.
        commit (`str`, *optional*): the commit of a Hub repository that was loaded. A model from a folder has none.
    """

    name: str
    num_layers: int
    model_type: str | None = None
    hidden_size: int | None = None
    commit: str | None = None

    @classmethod
    def of(cls, config: Any, num_layers: int) -> ModelFacts:
        """The facts about a model.

        Args:
            config (`PreTrainedConfig`): its config.
            num_layers (`int`): number of its decoder layers.
        """
        name = str(getattr(config, "_name_or_path", "") or "")
        return cls(
            name=name,
            num_layers=num_layers,
            model_type=getattr(config, "model_type", None),
            hidden_size=getattr(getattr(config, "text_config", config), "hidden_size", None),
            # where another class has loaded the model, the default revision is what it most likely is
            commit=getattr(config, "_commit_hash", None) or loaded_commit(name),
        )

    @property
    def hub_id(self) -> str | None:
        """The model's id on the Hub, if it was loaded by it or from a folder in the Hub's cache."""
        if not os.path.isdir(self.name):
            return self.name if is_hub_id(self.name) else None
        return cached_repo_id(self.name)

    @property
    def label(self) -> str:
        """How messages and shipped files call it: its id, or else the folder's name."""
        return self.hub_id or (os.path.basename(os.path.abspath(self.name)) if self.name else "")


def resolve_schedule(
    value: str | float | os.PathLike[str] | RecomputeSchedule, model: ModelFacts, lossy: bool = True
) -> RecomputeSchedule:
    """Turns the `schedule` setting into a schedule for a model.

    Args:
        value: the setting, see `VLCacheConfig.schedule`.
        model (`ModelFacts`): the model.
        lossy (`bool`, *optional*, defaults to `True`):
            Whether it will be used. Where it will not, `"auto"` looks for nothing.

    Raises:
        `ValueError`, `OSError`: the setting names no valid schedule of this model. `"auto"` never raises.
    """
    if isinstance(value, (int, float)):
        return RecomputeSchedule.uniform(float(value), model.num_layers)
    if value == "auto":
        return _automatic(model) if lossy else RecomputeSchedule.uniform(DEFAULT_RATIO, model.num_layers)
    schedule = value if isinstance(value, RecomputeSchedule) else RecomputeSchedule.from_pretrained(value)
    _check_fits(schedule, model)
    if schedule.model_id and model.hub_id and schedule.model_id != model.hub_id:
        logger.warning(
            "The recompute schedule was made for %r and is used for %r, which has the same number of layers. Whether "
            "it suits that model is not known.",
            schedule.model_id,
            model.hub_id,
        )
    return schedule


def _check_fits(schedule: RecomputeSchedule, model: ModelFacts) -> None:
    schedule.check_layers(model.num_layers)
    if schedule.model_type and model.model_type and schedule.model_type != model.model_type:
        raise ValueError(
            f"The schedule was made for models of type {schedule.model_type!r}"
            + (f" ({schedule.model_id!r})" if schedule.model_id else "")
            + f", but this model is of type {model.model_type!r}. Give a schedule of that type, or a ratio."
        )


def _automatic(model: ModelFacts) -> RecomputeSchedule:
    for file, why, certain in _candidates(model):
        try:
            schedule = RecomputeSchedule.from_file(file)
            _check_fits(schedule, model)
        except (OSError, ValueError) as error:
            logger.warning("The recompute schedule %s (%s) is not used: %s", file, why, error)
            continue
        logger.log(
            logging.INFO if certain and schedule.calibrated else logging.WARNING,
            "Recompute schedule of %s: %s (%s), mean ratio %.3f, made for %s, %s.",
            model.label or "this model",
            file.name,
            why,
            schedule.mean,
            schedule.model_id or "an unnamed model",
            "measured on it" if schedule.calibrated else "not measured on any model: a prior",
        )
        return schedule
    logger.warning(
        "No recompute schedule is known for %r: images met in another context recompute the first %d %% of their "
        'tokens at every layer. Set `schedule=` to choose, or `reuse="exact"` for lossless hits only.',
        model.label or "this model",
        round(100 * DEFAULT_RATIO),
    )
    return RecomputeSchedule.uniform(DEFAULT_RATIO, model.num_layers)


def _candidates(model: ModelFacts) -> Iterator[tuple[Path, str, bool]]:
    """Files to try, best first, each with the reason and whether it is meant for this very model."""
    own = _own_file(model)
    if own is not None:
        yield own, "from the model's own " + ("folder" if os.path.isdir(model.name) else "repository"), True
    shipped = shipped_file(Path(model.label).name)
    if shipped is not None:
        yield shipped, "shipped for the model", True
    for base in _base_models(model):
        shipped = shipped_file(Path(base).name)
        if shipped is not None:
            yield shipped, f"shipped for {base}, the base model that its card names", False
    for shipped in _shipped_for_architecture(model):
        yield shipped, "shipped for another model of the same type, number of layers and width", False


def _own_file(model: ModelFacts) -> Path | None:
    if os.path.isdir(model.name):
        file = Path(model.name, SCHEDULE_NAME)
        return file if file.is_file() else None
    # without a commit nothing was loaded from the Hub, and the name may be that of a folder which is gone
    return peek(model.name, model.commit) if model.commit and is_hub_id(model.name) else None


def _base_models(model: ModelFacts) -> list[str]:
    """The base models that the model's card names, where the card is on disk."""
    card: Any = os.path.join(model.name, "README.md")
    if not os.path.isdir(model.name):
        if not model.commit or not is_hub_id(model.name):
            return []
        card = try_to_load_from_cache(model.name, "README.md", cache_dir=constants.HF_HUB_CACHE, revision=model.commit)
    if not isinstance(card, str) or not os.path.isfile(card):
        return []
    try:
        named = (metadata_load(card) or {}).get("base_model")
    except Exception as error:  # people write cards by hand: YAML of any kind, or none
        logger.debug("The model card %s cannot be read: %s", card, error)
        return []
    return [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]


def _shipped_for_architecture(model: ModelFacts) -> Iterator[Path]:
    folder = shipped_schedules()
    if folder is None or model.hidden_size is None:
        return
    for file in sorted(folder.glob("*.json")):
        try:
            schedule = RecomputeSchedule.from_file(file)
        except (OSError, ValueError) as error:
            logger.debug("The shipped file %s cannot be read: %s", file, error)
            continue
        same = (schedule.model_type, schedule.num_layers, schedule.hidden_size) == (
            model.model_type,
            model.num_layers,
            model.hidden_size,
        )
        # `name.b0.025.json` is a further budget, which is chosen by name only
        if same and not re.search(r"\.b[\d.]+$", file.stem):
            yield file
