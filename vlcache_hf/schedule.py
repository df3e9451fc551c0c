"""Per-layer recompute ratios (paper section 4.1, "Dynamic Recomputation")."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SCHEDULE_NAME = "vlcache_schedule.json"
SCHEDULE_VERSION = 1
DEFAULT_RATIO = 0.1
_REQUIRED = ("version", "ratios")


@dataclass(frozen=True)
class RecomputeSchedule:
    """How large a share of the first tokens of a reused image every decoder layer recomputes.

    Args:
        ratios (sequence of `float`):
            One ratio per decoder layer, in [0, 1], non-increasing: a layer can only recompute tokens whose hidden
            states the layer below has computed (paper section 4.1).
        model_id (`str`, *optional*): the model the ratios were made for, as on the Hub.
        model_type (`str`, *optional*): its `config.model_type`.
        calibrated (`bool`, *optional*, defaults to `False`): whether the ratios were measured on the model.
        method (`dict`, *optional*): how they were made (data, samples, seed, budget, library versions).

    Raises:
        `ValueError`: a ratio is out of range or larger than the one before it; the message names layer and value.
    """

    ratios: tuple[float, ...]
    model_id: str | None = None
    model_type: str | None = None
    calibrated: bool = False
    method: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given: Any = self.ratios
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ValueError(f"`ratios` must be a sequence of one float per layer, got {given!r}.")
        ratios: list[float] = []
        for layer, ratio in enumerate(given):
            if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0.0 <= ratio <= 1.0:
                raise ValueError(f"The ratio of layer {layer} must be a number in [0, 1], got {ratio!r}.")
            if ratios and ratio > ratios[-1]:
                raise ValueError(
                    f"Ratios must not increase from layer to layer, but layer {layer} has {ratio} after {ratios[-1]}: "
                    "a layer cannot recompute tokens that the layer below it skipped."
                )
            ratios.append(float(ratio))
        if not ratios:
            raise ValueError("`ratios` is empty: give one ratio per decoder layer.")
        object.__setattr__(self, "ratios", tuple(ratios))

    @classmethod
    def uniform(cls, ratio: float, num_layers: int) -> RecomputeSchedule:
        """The same ratio at every layer (the paper's "Static Recompute").

        Args:
            ratio (`float`): share of the tokens, in [0, 1].
            num_layers (`int`): number of decoder layers, at least 1.
        """
        return cls((ratio,) * num_layers)

    @property
    def num_layers(self) -> int:
        return len(self.ratios)

    @property
    def mean(self) -> float:
        """The mean ratio, the paper's budget."""
        return sum(self.ratios) / len(self.ratios)

    def tokens(self, num_tokens: int) -> tuple[int, ...]:
        """Number of recomputed tokens at every layer for an image of `num_tokens` tokens: `floor(r_l * T)`."""
        # 0.29 * 100 is 28.999...: a hair of slack keeps the floor what the written ratio says
        return tuple(min(num_tokens, math.floor(ratio * num_tokens + 1e-9)) for ratio in self.ratios)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": SCHEDULE_VERSION,
            "model_id": self.model_id,
            "model_type": self.model_type,
            "num_layers": self.num_layers,
            "mean": self.mean,
            "calibrated": self.calibrated,
            "ratios": list(self.ratios),
            "method": self.method,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = "the schedule") -> RecomputeSchedule:
        """Checks and reads the content of a schedule file.

        Args:
            data (`dict`): the file's JSON object.
            source (`str`, *optional*): what error messages call it.

        Raises:
            `ValueError`: a required key is missing, the version is unknown, or the ratios do not fit.
        """
        if not isinstance(data, dict):
            raise ValueError(f"{source} must hold a JSON object, got {type(data).__name__}.")
        missing = [key for key in _REQUIRED if key not in data]
        if missing:
            raise ValueError(f"{source} lacks the required key(s) {missing}.")
        if data["version"] != SCHEDULE_VERSION:
            raise ValueError(
                f"{source} has version {data['version']!r}, this library reads version {SCHEDULE_VERSION}: "
                "upgrade vlcache-hf or use another file."
            )
        if not isinstance(data["ratios"], list):
            raise ValueError(f"`ratios` in {source} must be a list, got {data['ratios']!r}.")
        if "num_layers" in data and data["num_layers"] != len(data["ratios"]):
            raise ValueError(f"{source} says num_layers={data['num_layers']} but lists {len(data['ratios'])} ratios.")
        known = {"version", "model_id", "model_type", "num_layers", "mean", "calibrated", "ratios", "method"}
        unknown = sorted(set(data) - known)
        if unknown:
            logger.warning("Ignoring unknown key(s) %s in %s.", unknown, source)
        try:
            return cls(
                ratios=tuple(data["ratios"]),
                model_id=data.get("model_id"),
                model_type=data.get("model_type"),
                calibrated=bool(data.get("calibrated", False)),
                method=data.get("method") or {},
            )
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> Path:
        """Writes `vlcache_schedule.json` into a folder, which is created when missing, and returns the file's path."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / SCHEDULE_NAME
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        return path

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> RecomputeSchedule:
        """Reads a schedule file.

        Args:
            path (`str` or `os.PathLike`): a `.json` file, or a folder that holds a `vlcache_schedule.json`.

        Raises:
            `FileNotFoundError`: there is no such file.
            `ValueError`: it is not a valid schedule.
        """
        file = Path(path)
        if file.is_dir():
            file = file / SCHEDULE_NAME
        if not file.is_file():
            raise FileNotFoundError(
                f"No schedule at {str(file)!r}: give a {SCHEDULE_NAME}, a folder with one, a ratio such as 0.1, or "
                '"auto".'
            )
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{str(file)!r} is not JSON: {error}") from None
        return cls.from_dict(data, source=repr(str(file)))

    def check_layers(self, num_layers: int) -> RecomputeSchedule:
        """Returns itself, or raises a `ValueError` when it was made for another number of decoder layers."""
        if self.num_layers != num_layers:
            raise ValueError(
                f"The schedule has {self.num_layers} ratios but the model has {num_layers} decoder layers"
                + (f" (it was made for {self.model_id!r})" if self.model_id else "")
                + f". Give {num_layers} ratios, or one number for all layers."
            )
        return self


def shipped_schedules() -> Path | None:
    """The folder of the schedule files that come with the library (inside the wheel, or beside a source checkout)."""
    packaged = Path(str(resources.files("vlcache_hf"))) / "schedules"
    checkout = Path(__file__).resolve().parent.parent / "schedules"
    return next((folder for folder in (packaged, checkout) if folder.is_dir()), None)


def find_shipped(model_id: str) -> RecomputeSchedule | None:
    """The shipped schedule of a model, by its last path component (`Qwen3-VL-8B-Instruct`), if there is one."""
    folder, name = shipped_schedules(), Path(model_id).name
    if folder is None or not name:
        return None
    file = folder / f"{name}.json"
    return RecomputeSchedule.from_pretrained(file) if file.is_file() else None


def resolve_schedule(
    value: str | float | os.PathLike[str] | RecomputeSchedule, model_id: str, num_layers: int, lossy: bool = True
) -> RecomputeSchedule:
    """Turns the `schedule` setting into a schedule for a model.

    Args:
        value: the setting, see `VLCacheConfig.schedule`.
        model_id (`str`): `model.config._name_or_path`, used by `"auto"`.
        num_layers (`int`): number of decoder layers.
        lossy (`bool`, *optional*, defaults to `True`): whether it will be used, so that a default is worth a warning.

    Raises:
        `ValueError`, `FileNotFoundError`: the setting names no valid schedule of `num_layers` layers.
    """
    if isinstance(value, RecomputeSchedule):
        return value.check_layers(num_layers)
    if isinstance(value, (int, float)):
        return RecomputeSchedule.uniform(float(value), num_layers)
    if value != "auto":
        return RecomputeSchedule.from_pretrained(value).check_layers(num_layers)
    shipped = find_shipped(model_id)
    if shipped is not None and shipped.num_layers == num_layers:
        logger.info("Using the shipped recompute schedule of %s (mean %.3f).", Path(model_id).name, shipped.mean)
        return shipped
    logger.log(
        logging.WARNING if lossy else logging.INFO,
        "No recompute schedule is shipped for %r: images met in another context recompute the first %d %% of their "
        'tokens at every layer. Set `schedule=` to choose, or `reuse="exact"` for lossless hits only.',
        model_id or "this model",
        round(100 * DEFAULT_RATIO),
    )
    return RecomputeSchedule.uniform(DEFAULT_RATIO, num_layers)
