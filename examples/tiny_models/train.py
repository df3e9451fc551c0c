"""Train one of the two models from scratch: `python examples/tiny_models/train.py ordinary --out FOLDER`.

Seeds are fixed. The vision tower and the start of the language model are the same for both models and are kept in
`--work`, so that the second model takes less time; a training that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen3VLForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tiny_models.checkpoint import build_model, save
from tiny_models.language import Stage, train_language
from tiny_models.schedule import Progress
from tiny_models.vision import VisionStage, train_vision

SEED = 0
VISION = VisionStage("vision", 900, 2e-3, {4: 12, 6: 6, 8: 4, 12: 2, 16: 1}, shapes=16, scale=0.4)
# Shapes take more practice than digits.
SHAPES = VisionStage("shapes", 600, 1.5e-3, {4: 4, 8: 2, 16: 1}, shapes=64, scale=1.2, heads_only=60)
START = Stage(
    "start", 300, 3e-3, {"after": 1.0}, sizes={4: 1.0}, tokens=2000, batches=1, floor=0.5, guide=(0.5, 2.0), stop=100
)
LARGE = {4: 0.1, 6: 0.1, 8: 0.2, 12: 0.35, 16: 0.25}
FINAL = {
    "ordinary": [
        Stage("ordinary", 500, 2e-3, {"after": 0.35, "before": 0.25, "two": 0.25, "shapes": 0.15}, guide=(0.5, 0.6)),
        Stage(
            "ordinary-large", 360, 1.5e-3, {"after": 0.25, "before": 0.25, "two": 0.2, "shapes": 0.3},
            sizes=LARGE, grow=False, tokens=2500, guide=(0.3, 0.7),
        ),
    ],
    "routed": [
        Stage("routed", 500, 2e-3, {"after": 0.2, "before": 0.65, "two": 0.15}, hide=0.7, guide=(0.5, 0.6)),
        Stage(
            "routed-large", 360, 1.5e-3, {"after": 0.15, "before": 0.6, "two": 0.25}, hide=0.7,
            sizes=LARGE, grow=False, tokens=2500, guide=(0.3, 0.7),
        ),
    ],
}  # fmt: skip


def see(model: Qwen3VLForConditionalGeneration, stage: VisionStage, seed: int, work: Path) -> None:
    """A stage of the vision tower, or its result if there is one in `work`."""
    file = work / f"{stage.name}.pt"
    if not file.exists():
        accuracy = train_vision(model, stage, seed, Progress())
        print(f"{stage.name}, held out:", json.dumps(accuracy), flush=True)
        file.with_suffix(".json").write_text(json.dumps(accuracy, indent=1) + "\n")
        torch.save(model.model.visual.state_dict(), file)
    model.model.visual.load_state_dict(torch.load(file, weights_only=True))


def train(name: str, work: Path, quick: bool = False) -> Qwen3VLForConditionalGeneration:
    """All stages of one model."""
    vision, shapes, stages = VISION, SHAPES, [START, *FINAL[name]]
    if quick:
        vision, shapes = replace(vision, steps=3), replace(shapes, steps=3)
        stages = [replace(stage, steps=3, stop=None, tokens=600) for stage in stages]
    model = build_model(SEED)
    see(model, vision, SEED, work)
    see(model, shapes, SEED + 3, work)
    for index, stage in enumerate(stages):
        train_language(model, stage, SEED + (1, 2, 12)[index], Progress(), work / f"{stage.name}.pt")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(FINAL))
    parser.add_argument("--out", type=Path, required=True, help="folder to save model and processor in")
    parser.add_argument("--work", type=Path, help="folder of what can be taken up again (default: OUT/work)")
    parser.add_argument("--quick", action="store_true", help="three steps of each stage: only whether it runs")
    args = parser.parse_args()

    began = time.perf_counter()
    work = args.work or args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    save(train(args.model, work, args.quick), args.out)
    minutes = (time.perf_counter() - began) / 60
    print(f"Saved in {args.out} after {minutes:.1f} minutes on {torch.get_num_threads()} threads.")


if __name__ == "__main__":
    main()
