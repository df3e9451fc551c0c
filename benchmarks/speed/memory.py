"""Peak anonymous memory of one request: `RssAnon` of a process of its own. Mapped pages of files are not in it.

    python -m benchmarks.speed.memory --variant exact --tier ram --tokens 3025 --cache-dir /tmp/warm

is what `benchmarks/ttft.py --memory` runs for each variant, after one run with `--variant fill`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from .floor import ByHand
from .variants import RAM_BYTES
from .workload import ROOT, Workload, front_loaded, model_pair, offline, per_call, seconds

VARIANTS = (("stock", ""), ("cold", ""), ("exact", "ram"), ("exact", "disk"), ("dynamic", "disk"), ("by hand", ""))
PERIOD_S = 0.001


def anonymous_bytes() -> int:
    """`RssAnon` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("This system does not say how much anonymous memory a process has.")


class Peak:
    """A context whose largest `anonymous_bytes` are in `peak`, and those before it in `before`."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.before = self.peak = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(PERIOD_S):
            self.peak = max(self.peak, anonymous_bytes())


def measure_memory(architecture: str, size: str, tokens: int, folder: Path | None = None) -> dict[str, Any]:
    """Peaks of all variants, each in a process of its own.

    Args:
        architecture (`str`), size (`str`): of the model.
        tokens (`int`): of the image.
        folder (`Path`, *optional*): for the cache; a temporary one by default.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="vlcache-memory-") as made:
            return measure_memory(architecture, size, tokens, Path(made))
    rows = []
    for variant, tier in (("fill", "disk"), *VARIANTS):
        command = [sys.executable, "-m", "benchmarks.speed.memory", "--architecture", architecture, "--size", size]
        command += ["--tokens", str(tokens), "--variant", variant, "--tier", tier, "--cache-dir", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        if variant != "fill":
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    return {"architecture": architecture, "image_tokens": tokens, "variants": rows}


def measure_one(architecture: Any, size: Any, workload: Workload, variant: str, tier: str, folder: str) -> dict:
    """One request in this process; its inputs and the model count as there before it."""
    settings = {
        "cache_dir": folder,
        "schedule": 0.1,
        "min_free_bytes": 0,
        "min_tokens": 1,
        "max_ram_bytes": RAM_BYTES if tier == "ram" else 0,
    }
    stock, ours = model_pair(architecture, size, settings)
    pixels = workload.pixels(ours.config)
    inputs = workload.prompt(0, pixels)
    tiny = Workload(16, text=workload.text)  # thread pools and the fingerprint
    warming = tiny.prompt(0, tiny.pixels(ours.config))
    seconds(stock, warming)
    seconds(ours, warming)
    ours.vlcache.flush()
    by_hand = ByHand(stock, inputs, workload) if variant == "by hand" else None
    if tier == "ram":
        for _ in range(2):  # from the disk, and into memory
            seconds(ours, inputs)
    with Peak() as memory:
        if by_hand is not None:
            by_hand.seconds()
        elif variant == "stock":
            seconds(stock, inputs)
        elif variant == "cold":
            seconds(ours, inputs, per_call({"namespace": "cold"}))
        elif variant == "dynamic":
            schedule = front_loaded(ours.config.text_config.num_hidden_layers)
            seconds(ours, workload.prompt(1, pixels), per_call({"schedule": schedule}))
        else:
            seconds(ours, inputs)
    record = ours.vlcache.last_request
    expected = {"exact": "exact", "dynamic": "reused", "cold": "miss", "fill": "miss"}.get(variant)
    if expected is not None and record.images[0].kv != expected:
        raise RuntimeError(f"{variant}: {record}")
    ours.vlcache.flush()
    return {"name": variant, "tier": tier, "before_bytes": memory.before, "added_bytes": memory.peak - memory.before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=offline.ARCHITECTURES, default="qwen3_vl")
    parser.add_argument("--size", choices=("tiny", "demo"), default="demo")
    parser.add_argument("--tokens", type=int, default=3025)
    parser.add_argument("--variant", choices=("fill", *dict(VARIANTS)), required=True)
    parser.add_argument("--tier", choices=("", "ram", "disk"), default="")
    parser.add_argument("--cache-dir", required=True)
    args = parser.parse_args()
    workload = Workload(args.tokens)
    print(json.dumps(measure_one(args.architecture, args.size, workload, args.variant, args.tier, args.cache_dir)))


if __name__ == "__main__":
    main()
