"""Makes the schedules of this folder that are not measured: `python schedules/make_priors.py` (README.md says why).

All arithmetic is on integers, in steps of 0.002 as in the paper, so that every machine makes the same files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vlcache_hf import RecomputeSchedule

STEP = 0.002
TOP = 150  # steps: the paper's largest ratio, 0.3
# id on the Hub: (model type, decoder layers, width, budgets); the first budget is what "auto" takes
MODELS: dict[str, tuple[str, int, int, tuple[float, ...]]] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": ("qwen2_5_vl", 36, 2048, (0.1, 0.05)),
    "Qwen/Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl", 28, 3584, (0.1, 0.05)),
    "Qwen/Qwen2.5-VL-32B-Instruct": ("qwen2_5_vl", 64, 5120, (0.04, 0.02)),
    "Qwen/Qwen2.5-VL-72B-Instruct": ("qwen2_5_vl", 80, 8192, (0.04, 0.02)),
    "Qwen/Qwen3-VL-2B-Instruct": ("qwen3_vl", 28, 2048, (0.035, 0.025)),
    "Qwen/Qwen3-VL-4B-Instruct": ("qwen3_vl", 36, 2560, (0.035, 0.025)),
    "Qwen/Qwen3-VL-8B-Instruct": ("qwen3_vl", 36, 4096, (0.035, 0.025)),
    "Qwen/Qwen3-VL-32B-Instruct": ("qwen3_vl", 64, 5120, (0.035, 0.025)),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": ("qwen3_vl_moe", 48, 2048, (0.035, 0.025)),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": ("qwen3_vl_moe", 94, 4096, (0.035, 0.025)),
}
RULE = (
    "linear from top at layer 1 down to floor behind the head, layer 0 as layer 1, in steps of 0.002 rounded down; "
    "floor: a fifth of the budget; head: the first third of the layers, longer where top would pass 0.3; top: the "
    "largest that keeps the mean within the budget"
)


def steps(num_layers: int, floor: int, head: int, top: int) -> list[int]:
    """Ratios in steps of 0.002; `head` is the number of layers behind layer 0 that are above the floor."""
    decay = [floor + (top - floor) * (head - layer) // head for layer in range(head)]
    return [top, *decay, *[floor] * (num_layers - 1 - head)]


def prior(model_id: str, budget: float) -> RecomputeSchedule:
    """The schedule of a model for a mean ratio of at most `budget`."""
    model_type, num_layers, hidden_size, _ = MODELS[model_id]
    thousandths = round(1000 * budget)
    floor = thousandths // 10  # a fifth of the budget, in steps of two thousandths
    allowed = num_layers * thousandths // 2

    def fits(head: int, top: int) -> bool:
        return sum(steps(num_layers, floor, head, top)) <= allowed

    head = next(head for head in range(-(-num_layers // 3), num_layers) if not fits(head, TOP))
    top = max(top for top in range(floor, TOP) if fits(head, top))
    return RecomputeSchedule(
        tuple(round(step * STEP, 3) for step in steps(num_layers, floor, head, top)),
        model_id=model_id,
        model_type=model_type,
        hidden_size=hidden_size,
        budget=budget,
        calibrated=False,
        method={
            "name": "prior",
            "rule": RULE,
            "floor": round(floor * STEP, 3),
            "head": head,
            "top": round(top * STEP, 3),
            "command": "python schedules/make_priors.py",
        },
    )


def files() -> dict[str, str]:
    """All files by name, with their content."""
    made = {}
    for model_id, (*_, budgets) in MODELS.items():
        for budget in budgets:
            mark = "" if budget == budgets[0] else f".b{budget:g}"
            made[f"{Path(model_id).name}{mark}.json"] = prior(model_id, budget).to_json_string()
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    folder = parser.parse_args().out
    for name, content in files().items():
        (folder / name).write_text(content, encoding="utf-8")
