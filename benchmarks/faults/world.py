"""A stock model, its answers to a few prompts, and models with a cache that must give the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import Row

import tiny
from vlcache_hf import VLCache, attach

ATOL = 1e-5  # fp32; exact hits were computed by another kernel call, so bits may differ
SIDES = ((8, 8), (8, 12), (4, 8))


class World:
    """Prompts with the stock model's logits. Prompts of odd number are asked through `generate()`.

    Args:
        size (`int`): number of prompts; images and texts are shared between them.
    """

    def __init__(self, size: int) -> None:
        torch.set_num_threads(1)  # no thread pool: processes are forked from here
        self.inputs = [self._prompt(number) for number in range(size)]
        self._stock = tiny.stock("qwen3_vl")
        self.answers = [self._logits(self._stock, number, {}) for number in range(size)]

    def model(self, folder: Path, **settings: Any) -> Any:
        """A model with a cache in `folder`: lossless, and without RAM and background unless asked for."""
        plain = {
            "reuse": "exact",
            "write_behind": False,
            "max_ram_bytes": 0,
            "min_free_bytes": 0,
            "min_tokens": 1,
        }
        return attach(tiny.stock("qwen3_vl"), {**plain, "cache_dir": folder, **settings})

    def ask(self, row: Row, model: Any, number: int, where: str, cache: VLCache | None = None) -> str:
        """Asks one prompt and counts the answer; returns `"exact"` or `"miss"`."""
        logits = self._logits(model, number, {} if cache is None else {"cache": cache})
        error = float((logits - self.answers[number]).abs().max())
        kind = tiny.kinds(model)[0]
        if not error <= ATOL:
            row.saw(f"logits differ by {error:.2g} ({kind})", where)
        else:
            row.saw("hit" if kind == "exact" else "miss", where)
        record = model.vlcache.last_request.images[0]
        row.note(f"kv {kind}, encoder {record.encoder}")
        return kind

    def _prompt(self, number: int) -> dict[str, torch.Tensor]:
        image = tiny.image(number // 2, *SIDES[number // 2 % len(SIDES)])
        return tiny.batch(tiny.prompt(tiny.text(number % 2, 4 + number % 2), image, tiny.text(number, 5)))

    def _logits(self, model: Any, number: int, extra: dict[str, Any]) -> torch.Tensor:
        inputs = self.inputs[number]
        with torch.no_grad():
            if number % 2 == 0:
                return model(**tiny.clone(inputs), logits_to_keep=1, **extra).logits[:, -1]
            asked = {"return_dict_in_generate": True, "output_logits": True, **extra}
            return torch.cat(tiny.generate(model, inputs, tokens=2, **asked).logits)


def close_stores(model: Any) -> None:
    """Closes and forgets the stores of a model, of which a benchmark opens thousands."""
    for store in model.vlcache._stores.values():
        store.close()
    model.vlcache._stores.clear()
