"""Sizes, ages and times as people write and read them."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Any

import click

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_BYTES = {
    **{unit.lower(): 1024**power for power, unit in enumerate(_UNITS)},
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NUMBER = r"\s*(\d+(?:\.\d+)?)\s*"


class Size(click.ParamType):
    """Bytes, with or without a unit: `10GiB`, `500MB`, `1048576`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(_NUMBER + r"([a-z]*)\s*", value.lower())
        # 10G is not guessed at: it is 7 % more or less
        if match is None or (match[2] or "b") not in _BYTES:
            self.fail(f"{value!r} is no size. Give bytes, or a number and a unit: 10GiB, 500MB.", param, ctx)
        return int(float(match[1]) * _BYTES[match[2] or "b"])


class Age(click.ParamType):
    """Seconds, written with a unit: `30d`, `12h`, `90m`."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(_NUMBER + r"([a-z])\s*", value.lower())
        if match is None or match[2] not in _SECONDS:
            self.fail(
                f"{value!r} is no age. Give a number and a unit (s, m for minutes, h, d, w): 30d, 12h.", param, ctx
            )
        return float(match[1]) * _SECONDS[match[2]]


def size_text(nbytes: float) -> str:
    """`nbytes` for people, at most 10 characters wide."""
    for unit in _UNITS:
        if nbytes < 1024 or unit == _UNITS[-1]:
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"


def duration_text(seconds: int) -> str:
    """A time left for people, at most 8 characters wide: `6d 23h`, `59m`."""
    if seconds >= 1000 * 86400:
        return "> 999d"
    minutes, hours, days = seconds // 60 % 60, seconds // 3600 % 24, seconds // 86400
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m" if minutes else f"{seconds}s"


def time_text(seconds: float | None) -> str:
    """A time since the epoch for people, in their time zone."""
    return "-" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def time_json(seconds: float | None) -> str | None:
    """A time since the epoch for programs: ISO 8601, UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def printable(text: str, width: int | None = None) -> str:
    """`text`, which may come from a foreign file, without control characters; shortened in front to `width`."""
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if width is None or len(text) <= width else "…" + text[1 - width :]
