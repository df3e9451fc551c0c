"""`benchmarks/ttft.py` on the smallest model: every row is there, and the tables go where they belong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.speed import report, tables
from benchmarks.speed.floor import ByHand
from benchmarks.speed.main import main
from benchmarks.speed.measure import Budget, settled
from benchmarks.speed.pictures import measure_pictures
from benchmarks.speed.workload import MEAN_RATIO, Workload, front_loaded, model_pair

WAYS = ["encoder only", *(f"static {ratio:g}" for ratio in (0.3, 0.2, 0.1, 0.0)), "dynamic 0.035", "uniform 0.035"]
LABELS = {
    "stock",
    "cold",
    *(f"{way} ({tier})" for way in [*WAYS, "exact"] for tier in ("ram", "disk")),
    *(f"floor {kind}: {part}" for kind in ("exact", "dynamic") for part in ("forward", "copy")),
    "by hand",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ttft") / "results.json"
    main(["--size", "tiny", "--tokens", "16", "36", "--images", "2", "--rounds", "1", "--json", str(path)])
    return path


def test_every_row_is_measured(measured: Path) -> None:
    content = json.loads(measured.read_text(encoding="utf-8"))
    assert {"command", "machine", "versions", "results", "pictures", "memory"} <= content.keys()
    assert [result["image_tokens"] for result in content["results"]] == [16, 36]
    for result in content["results"]:
        assert (result["images"], result["text_tokens"], result["skipped"]) == (2, 20, [])
        assert result["variants"].keys() == LABELS
        assert result["entry_bytes"] > 0 < result["fill_s"]
        for row in result["variants"].values():
            assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"] and row["runs"] == 1
            assert row["speedup_min"] <= row["speedup"] <= row["speedup_max"]
        assert {"fingerprint", "hashing", "prefill", "storing"} <= result["variants"]["exact (ram)"]["parts"].keys()


def test_tables_go_between_the_markers(measured: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- table: shapes -->\nold\n<!-- end -->\nb\n<!-- table: memory -->\nnone yet\n<!-- end -->\n"
    )
    for _ in range(2):  # the markers stay
        report.main([str(measured), "--into", str(page)])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("a\n<!-- table: shapes -->\n| model |") and "| qwen3_vl | 2 | 36 | 20 |" in text
    assert "old" not in text and "none yet" in text and text.count("<!-- end -->") == 2
    results = json.loads(measured.read_text(encoding="utf-8"))["results"]
    assert "| w/o ViT (encoder only), memory |" in tables.speedups(results)
    assert "exact: ram / floor" in tables.floors(results) and "| prefill |" in tables.breakdown(results, "exact (ram)")


def test_the_page_has_a_place_for_every_table() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    names = [match[2] for match in report.TABLE.finditer(page)]
    assert {"speedups qwen3_vl", "speedups qwen2_5_vl", "floors qwen3_vl", "breakdown qwen3_vl exact (ram)"} <= {
        *names
    }
    assert {"shapes", "pictures", "memory", "source"} <= {*names}


def test_the_budget_of_a_variant() -> None:
    budget = Budget(10.0, {"stock": (100, 3.0)})
    assert budget.allows("stock", 100, []) and not budget.allows("stock", 200, [])  # 12 s are to be expected
    assert budget.allows("exact", 200, [])
    assert budget.allows("stock", 100, [3.0, 3.0]) and not budget.allows("stock", 100, [3.0, 3.0, 3.0])
    assert settled({0: 1.0}) == {0: 1.0} and settled({0: 1.0, 1: 2.0}) == {1: 2.0}


def test_schedule_and_prefix_are_what_they_say() -> None:
    ratios = front_loaded(12).ratios
    assert len(ratios) == 12 and 0.9 * MEAN_RATIO < sum(ratios) / 12 <= MEAN_RATIO and ratios[0] > 4 * ratios[-1]
    stock, ours = model_pair("qwen3_vl", "tiny", {})
    assert all(a is b for a, b in zip(stock.parameters(), ours.parameters()))
    workload = Workload(16, images=2)
    inputs = workload.prompt(0, workload.pixels(stock.config))
    by_hand = ByHand(stock, inputs, workload)
    expected = stock.generate(**inputs, max_new_tokens=3, do_sample=False)
    for _ in range(2):  # the prefix is copied, not continued
        assert torch.equal(
            stock.generate(**by_hand.inputs, cache=by_hand.cache(), max_new_tokens=3, do_sample=False), expected
        )


def test_processor_and_model_together() -> None:
    pytest.importorskip("skimage")
    rows = measure_pictures("qwen3_vl", "tiny", 64, rounds=1)
    assert [row["source"] for row in rows] == ["PIL image", "JPEG path"]
    for row in rows:
        assert row["image_tokens"] == 64 and row["stock_s"] > row["stock_processor_s"] > 0
        assert 0 < row["exact_processor_share"] < 1 and row["speedup"] > 0
    assert "| JPEG path | 64 |" in tables.pictures(rows)
