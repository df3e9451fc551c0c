from __future__ import annotations

import click
import pytest

from vlcache_hf.cli.units import Age, Size, duration_text, printable, size_text, time_json


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("10B", 10),
        ("10GiB", 10 * 2**30),
        (" 1.5 kib ", 1536),
        ("500MB", 500_000_000),
        ("2tb", 2 * 10**12),
    ],
)
def test_sizes(text, nbytes):
    assert Size().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "10G", "-1", "ten", "10 potatoes", "1e9", "GiB"])
def test_what_is_no_size(text):
    with pytest.raises(click.BadParameter, match="is no size. Give bytes, or a number and a unit: 10GiB"):
        Size().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 30 * 86400), ("12h", 43200), ("90m", 5400), ("1.5s", 1.5), ("2W", 14 * 86400)]
)
def test_ages(text, seconds):
    assert Age().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "30", "30 days", "-1d", "1y"])
def test_what_is_no_age(text):
    with pytest.raises(click.BadParameter, match="is no age"):
        Age().convert(text, None, None)


def test_durations():
    texts = [duration_text(s) for s in (0, 59, 60, 3599, 3600, 86399, 86400, 7 * 86400, 999 * 86400 + 86399, 2**62)]
    assert texts == ["0s", "59s", "1m", "59m", "1h 0m", "23h 59m", "1d 0h", "7d 0h", "999d 23h", "> 999d"]
    assert max(map(len, texts)) == 8


def test_texts():
    assert [size_text(n) for n in (0, 1023, 1024, 1536 * 2**20, 5000 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "5000.0 TiB",
    ]
    assert time_json(0.0) == "1970-01-01T00:00:00+00:00"
    assert time_json(None) is None
    assert printable("a\x1b[31mb\n") == "a?[31mb?"
    assert printable("Qwen/Qwen3-VL@0123", 8) == "…VL@0123"
