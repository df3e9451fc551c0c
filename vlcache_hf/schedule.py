"""Per-layer recompute ratios (paper section 4.1, "Dynamic Recomputation") and the file that holds them."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .schedule_hub import SCHEDULE_NAME, locate, push, shipped_schedules

__all__ = ["SCHEDULE_NAME", "SCHEDULE_VERSION", "RecomputeSchedule", "shipped_schedules"]

logger = logging.getLogger(__name__)

SCHEDULE_VERSION = 1
_REQUIRED = ("version", "ratios")
# What else a file may say about its schedule, with the type of each.
_OPTIONAL: dict[str, tuple[type, ...]] = {
    "model_id": (str,),
    "model_type": (str,),
    "hidden_size": (int,),
    "budget": (int, float),
    "calibrated": (bool,),
    "method": (dict,),
    "guard_threshold": (int, float),
}


@dataclass(frozen=True)
class RecomputeSchedule:
    """How large a share of the first tokens of a reused image every decoder layer recomputes.

    Args:
        ratios (sequence of `float`): one ratio per decoder layer, in [0, 1], non-increasing: a layer can only
            recompute tokens whose hidden states the layer below has computed (paper section 4.1).
        model_id (`str`, *optional*): the model the ratios were made for, as on the Hub.
        model_type (`str`, *optional*): its `config.model_type`.
        calibrated (`bool`, *optional*, defaults to `False`): whether the ratios were measured on the model.
        method (`dict`, *optional*): how they were made (method, data, samples, seed, library versions).
        budget (`float`, *optional*): the mean ratio that was asked for, as the paper counts it: over all layers.
        hidden_size (`int`, *optional*): width of the model's decoder. A shipped file that says it also serves models
            of another name with the same `model_type`, number of layers and width.
        guard_threshold (`float`, *optional*): `VLCacheConfig.guard_threshold` for this model, as `vlcache audit` or
            `benchmarks/accuracy` finds it.

    Raises:
        `ValueError`: a ratio is out of range or larger than the one before it, or `guard_threshold` is negative; the
            message names layer and value.
    """

    ratios: tuple[float, ...]
    model_id: str | None = None
    model_type: str | None = None
    calibrated: bool = False
    method: dict[str, Any] = field(default_factory=dict, hash=False)
    budget: float | None = None
    hidden_size: int | None = None
    guard_threshold: float | None = None

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
        limit: Any = 0.0 if self.guard_threshold is None else self.guard_threshold
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0.0 <= limit < math.inf:
            raise ValueError(f"`guard_threshold` must be a deviation of at least 0, got {self.guard_threshold!r}.")
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
        """The mean ratio over all layers, which the paper calls the recompute ratio of a schedule."""
        return sum(self.ratios) / len(self.ratios)

    def tokens(self, num_tokens: int) -> tuple[int, ...]:
        """Number of recomputed tokens at every layer for an image of `num_tokens` tokens: `floor(r_l * T)`."""
        # 0.29 * 100 is 28.999...: a hair of slack keeps the floor what the written ratio says
        return tuple(min(num_tokens, math.floor(ratio * num_tokens + 1e-9)) for ratio in self.ratios)

    def check_layers(self, num_layers: int) -> RecomputeSchedule:
        """Returns itself, or raises a `ValueError` when it was made for another number of decoder layers."""
        if self.num_layers != num_layers:
            raise ValueError(
                f"The schedule has {self.num_layers} ratios but the model has {num_layers} decoder layers"
                + (f" (it was made for {self.model_id!r})" if self.model_id else "")
                + f". Give {num_layers} ratios, or one number for all layers."
            )
        return self

    # --- the file

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": SCHEDULE_VERSION,
            "model_id": self.model_id,
            "model_type": self.model_type,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "budget": self.budget,
            "mean": round(self.mean, 6),
            "calibrated": self.calibrated,
            "method": self.method,
            **({} if self.guard_threshold is None else {"guard_threshold": self.guard_threshold}),
            "ratios": list(self.ratios),
        }

    def to_json_string(self) -> str:
        """The content of a schedule file."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = "the schedule") -> RecomputeSchedule:
        """Checks and reads the content of a schedule file.

        Args:
            data (`dict`): the file's JSON object.
            source (`str`, *optional*): what error messages call it.

        Raises:
            `ValueError`: a required key is missing, the version is unknown, or a value does not fit.
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
        if data.get("num_layers", len(data["ratios"])) != len(data["ratios"]):
            raise ValueError(f"{source} says num_layers={data['num_layers']} but lists {len(data['ratios'])} ratios.")
        fields: dict[str, Any] = {}
        for key, types in _OPTIONAL.items():
            value = data.get(key)
            if value is None:
                continue
            # True is an int in Python, but no width
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise ValueError(f"`{key}` in {source} must be a {types[-1].__name__}, got {value!r}.")
            fields[key] = value
        unknown = sorted(set(data) - {*_REQUIRED, *_OPTIONAL, "num_layers", "mean"})
        if unknown:
            logger.warning("Ignoring unknown key(s) %s in %s.", unknown, source)
        try:
            return cls(ratios=tuple(data["ratios"]), **fields)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    @classmethod
    def from_file(cls, file: str | os.PathLike[str]) -> RecomputeSchedule:
        """Reads a file on disk.

        Args:
            file (`str` or `os.PathLike`): the file.

        Raises:
            `OSError`: it cannot be read.
            `ValueError`: it is not a valid schedule.
        """
        try:
            data = json.loads(Path(file).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{str(file)!r} is not JSON: {error}") from None
        return cls.from_dict(data, source=repr(str(file)))

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name: str | os.PathLike[str],
        file_name: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        revision: str = "main",
        subfolder: str = "",
        proxies: dict[str, str] | None = None,
    ) -> RecomputeSchedule:
        """Reads a schedule from a file, a folder, the shipped ones or the Hub, in this order.

        Args:
            pretrained_model_name (`str` or `os.PathLike`):
                A `.json` file; a folder with a `vlcache_schedule.json`; the name of a shipped file
                (`"Qwen3-VL-8B-Instruct.b0.025"`); a Hub id (`"org/name"`), or a file in a repository on the Hub
                (`"org/name/vlcache_schedule.b0.025.json"`).
            file_name (`str`, *optional*, defaults to `"vlcache_schedule.json"`):
                Name of the file in the folder or repository.
            cache_dir, force_download, local_files_only, token, revision, subfolder, proxies:
                As in `GenerationConfig.from_pretrained`.

        Raises:
            `OSError`: there is no such file, or the Hub cannot be reached and its cache does not have it.
            `ValueError`: it is not a valid schedule.
        """
        file = locate(
            pretrained_model_name,
            file_name or SCHEDULE_NAME,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
            revision=revision,
            subfolder=subfolder,
            proxies=proxies,
        )
        return cls.from_file(file)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        file_name: str | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> Path:
        """Writes the schedule into a folder, which is created when missing.

        Args:
            save_directory (`str` or `os.PathLike`): the folder.
            file_name (`str`, *optional*, defaults to `"vlcache_schedule.json"`): name of the file in it.
            push_to_hub (`bool`, *optional*, defaults to `False`):
                Whether to push it to the Hub too, into `repo_id` or else a repository with the name of the folder.
            **kwargs: further arguments of `push_to_hub`.

        Returns:
            `Path`: the file.
        """
        if kwargs and not push_to_hub:
            raise TypeError(f"{sorted(kwargs)} mean something with `push_to_hub=True` only.")
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (file_name or SCHEDULE_NAME)
        path.write_text(self.to_json_string(), encoding="utf-8")
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.resolve().name), file_name=file_name, **kwargs)
        return path

    def push_to_hub(
        self,
        repo_id: str,
        *,
        file_name: str | None = None,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Uploads the schedule to the Hub, and describes it in a section of the repository's model card.

        The rest of the card stays as it is. A second push of the same `file_name` replaces its file and its section.

        Args:
            repo_id (`str`): the repository, created when missing.
            file_name (`str`, *optional*, defaults to `"vlcache_schedule.json"`):
                Name of the file. The default is what `"auto"` looks for; a further budget of the same model goes
                beside it as `vlcache_schedule.b0.025.json`.
            commit_message, commit_description, private, token, revision, create_pr:
                As in `PreTrainedModel.push_to_hub`.

        Returns:
            `str`: URL of the commit.
        """
        return push(
            self,
            repo_id,
            file_name or SCHEDULE_NAME,
            commit_message=commit_message or f"Upload {type(self).__name__}",
            commit_description=commit_description,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
        )
