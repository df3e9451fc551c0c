"""What storing KV in 8 bits saves and loses: bytes, error of the KV, error of the logits of an exact hit, in one run.

    python benchmarks/precision.py --tokens 1024 --json benchmarks/results/precision_cpu.json

Random weights at a CPU-sized shape, fp32, as in `benchmarks/ttft.py`; the weights are random, so the errors of trained
models differ. The sizes are those of a model in bfloat16 as well, from the formula that the store itself uses.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vlcache_hf  # noqa: E402
from benchmarks.speed import header  # noqa: E402
from benchmarks.speed.workload import Workload, offline  # noqa: E402
from vlcache_hf import VLCache  # noqa: E402
from vlcache_hf.precision import STORAGE_DTYPES, KVShape  # noqa: E402


def logits(model: Any, inputs: dict[str, torch.Tensor], **settings: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, logits_to_keep=1, cache=VLCache(**settings)).logits[0, -1]


def measure(architecture: Any, tokens: int) -> list[dict[str, Any]]:
    """A row per precision."""
    with tempfile.TemporaryDirectory(prefix="vlcache-precision-") as folder:
        ours = vlcache_hf.attach(offline.build_model(architecture, "demo"), {"cache_dir": folder, "min_tokens": 1})
        text, workload = ours.config.text_config, Workload(tokens)
        inputs = workload.prompt(0, workload.pixels(ours.config))
        rows = []
        for storage in STORAGE_DTYPES:
            cold = logits(ours, inputs, storage_dtype=storage)
            stored = ours.vlcache.last_request.images[0]
            warm = logits(ours, inputs, storage_dtype=storage)
            hit = ours.vlcache.last_request.images[0]
            if not stored.stored or hit.kv != "exact":
                raise RuntimeError(f"not a hit: {ours.vlcache.last_request}")
            head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            shapes = [KVShape(1, 1, head_dim, torch.bfloat16, name) for name in ("auto", storage)]
            rows.append(
                {
                    "architecture": architecture,
                    "image_tokens": tokens,
                    "storage_dtype": storage,
                    "bytes_read": hit.bytes_read,
                    "bytes_of_float32": round(hit.bytes_read / (rows[0]["bytes_read"] if rows else hit.bytes_read), 4),
                    "bytes_of_bfloat16": round(shapes[1].nbytes(1) / shapes[0].nbytes(1), 4),
                    "kv_error": stored.storage_error,
                    "logit_error": float((warm - cold).norm() / cold.norm()),
                    "same_token": bool(warm.argmax() == cold.argmax()),
                }
            )
        return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'model':<12}{'tokens':>7}  {'stored as':<10}{'of fp32':>9}{'of bf16':>9}{'KV error':>11}{'logit error':>13}"
    ]
    for row in rows:
        lines.append(
            f"{row['architecture']:<12}{row['image_tokens']:>7}  {row['storage_dtype']:<10}"
            f"{row['bytes_of_float32']:>9.1%}{row['bytes_of_bfloat16']:>9.1%}"
            f"{row['kv_error']:>11.1e}{row['logit_error']:>13.1e}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=["qwen3_vl"], choices=offline.ARCHITECTURES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024], help="image tokens, square numbers")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    rows = [row for name in args.architectures for tokens in args.tokens for row in measure(name, tokens)]
    print(table(rows))
    if args.json:
        header.write(args.json, header.report("benchmarks/precision.py", rows))


if __name__ == "__main__":
    main()
