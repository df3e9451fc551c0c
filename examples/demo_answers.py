"""What a trained model answers, with the cache and without: `python examples/demo_answers.py`, first act of the demo.

The model is `tiny_models/ordinary`: 2.2 million parameters, trained on grids of handwritten digits (real ones, from
scikit-learn) and on the shapes of easy-VQA. The pictures are held out; they go through the real processor, with the
fast path.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import logging

from tiny_models import tasks
from tiny_models.grammar import Kind, conversation, question
from tiny_models.pictures import generator
from vlcache_hf import VLCacheConfig, attach_processor

MODEL = Path(__file__).resolve().parent / "tiny_models" / "ordinary"
# kind of question, whether it stands in front of the picture, and what the cache makes of the picture then
Prompts = tuple[tuple[Kind, bool, str], ...]
GRID: Prompts = (
    ("digit", False, "miss"),
    ("color", False, "exact"),
    ("both", False, "exact"),
    ("digit", True, "reused"),
)
SHAPE: Prompts = (("shape", False, "miss"), ("shape", False, "exact"), ("shape", True, "reused"))
# name, and rows and columns of image tokens
PICTURES = (("4 x 4", 4, GRID), ("8 x 8", 8, GRID), ("12 x 12", 12, GRID), ("shape", 4, SHAPE), ("shape", 4, SHAPE))


def reply(model: Any, processor: Any, messages: list[Any]) -> str:
    """The greedy answer to a chat."""
    inputs = tasks.inputs(processor, messages)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def show(cache_dir: Path) -> int:
    """Asks both models everything and prints a row for each question; returns the exit status."""
    # the smallest pictures are 16 tokens: of this model even they are to be seen at work
    settings = VLCacheConfig(cache_dir=cache_dir, schedule=0.1, min_tokens=1)
    processor = AutoProcessor.from_pretrained(MODEL)
    fast = attach_processor(AutoProcessor.from_pretrained(MODEL), settings)
    stock: Any = AutoModelForImageTextToText.from_pretrained(MODEL)
    model: Any = AutoModelForImageTextToText.from_pretrained(
        MODEL, attn_implementation="vlcache", vlcache_config=settings
    )
    print(f"{'picture':<8}{'question':<52}{'KV':<8}{'truth':<10}{'stock':<10}vlcache\n" + "-" * 97)
    problems, right, asked = [], [0, 0], 0
    rng = generator("test", 0)
    for name, size, prompts in PICTURES:
        (picture,) = tasks.held_out(rng, prompts[0][0], 1, size)
        turn = ("", "")
        for kind, first, expected in prompts:
            last = turn
            while turn == last:
                turn = question(rng, picture, kind)
            messages = conversation([picture], [turn], question_first=first)[:-1]
            said = [reply(*pair, tasks.shown(messages)) for pair in ((stock, processor), (model, fast))]
            (record,) = model.vlcache.last_request.images
            asked += 1
            right = [count + (answer == turn[1]) for count, answer in zip(right, said)]
            text = f"{turn[0]} [picture]" if first else f"[picture] {turn[0]}"
            print(f"{name:<8}{text:<52}{record.kv:<8}{turn[1]:<10}{said[0]:<10}{said[1]}")
            if record.kv != expected:
                problems.append(f"{text}: expected {expected}, got {record.kv}")
            if record.kv != "reused" and said[0] != said[1]:
                problems.append(f"{text}: {record.kv}, but the answer differs from stock")
    print(f"\nRight: stock {right[0]} of {asked}, vlcache {right[1]} of {asked}.")
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems or right[1] < asked - 2 else 0


if __name__ == "__main__":
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="vlcache-demo-") as folder:
        sys.exit(show(Path(folder)))
