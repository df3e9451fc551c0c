"""End to end, processor included: a photograph as the user has it, to the first token."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .workload import model_pair, offline

QUESTION = "What does this picture show?"
ROUNDS_OF_WARMING = 3  # miss; first use from the disk; from then on in memory


def photograph(tokens: int, architecture: str) -> Any:
    """A photograph of about so many tokens.

    Args:
        tokens (`int`): a square number.
        architecture (`str`): decides the size of a patch.
    """
    side = math.isqrt(tokens) * (28 if architecture == "qwen2_5_vl" else 32)
    return offline.photographs()["hubble_deep_field"].resize((side, side))


def measure_pictures(architecture: Any, size: Any, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each kind of source: stock processor and model against the fast path and an exact hit.

    Args:
        architecture (`str`), size (`str`): of the model.
        tokens (`int`): of the photograph.
        rounds (`int`): of all, in turns.
    """
    from vlcache_hf.processing import attach_processor

    rows = []
    with tempfile.TemporaryDirectory(prefix="vlcache-picture-") as folder:
        settings = {"cache_dir": Path(folder) / "cache", "min_free_bytes": 0, "min_tokens": 1}
        stock, ours = model_pair(architecture, size, settings)
        plain = offline.build_processor(architecture)
        fast = attach_processor(offline.build_processor(architecture), settings)
        picture = photograph(tokens, architecture)
        path = Path(folder) / "photograph.jpg"
        picture.save(path, quality=90)
        for source, image in (("PIL image", picture), ("JPEG path", str(path))):
            times: dict[str, list[tuple[float, float]]] = {"stock": [], "exact": []}
            for index in tqdm(range(-ROUNDS_OF_WARMING, rounds), desc=f"{architecture} {source}", disable=None):
                if index in (-ROUNDS_OF_WARMING, *range(rounds)):
                    times["stock"].append(_ask(plain, stock, image))
                times["exact"].append(_ask(fast, ours, image))
                record = ours.vlcache.last_request
                if index >= 0 and (record.images[0].kv != "exact" or record.images[0].encoder != "skipped"):
                    raise RuntimeError(f"not an exact hit: {record}")
                ours.vlcache.flush()
            row = {"architecture": architecture, "source": source, "image_tokens": record.images[0].tokens}
            for name, taken in times.items():
                warm = taken[-rounds:]
                row |= {
                    f"{name}_s": round(statistics.median(sum(pair) for pair in warm), 5),
                    f"{name}_processor_s": round(statistics.median(first for first, _ in warm), 5),
                    f"{name}_processor_share": round(statistics.median(a / (a + b) for a, b in warm), 4),
                }
            row["speedup"] = round(
                statistics.median(sum(a) / sum(b) for a, b in zip(times["stock"][-rounds:], times["exact"][-rounds:])),
                3,
            )
            rows.append(row)
    return rows


def _ask(processor: Any, model: Any, image: Any) -> tuple[float, float]:
    """Seconds of the processor, and from there to the first token."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    start = time.perf_counter()
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    made = time.perf_counter()
    model.generate(**inputs, max_new_tokens=1, do_sample=False)
    return made - start, time.perf_counter() - made
