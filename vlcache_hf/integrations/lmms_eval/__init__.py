"""`lmms-eval --model vlcache`: the benchmarks of the paper, with images reused from another context.

lmms-eval finds `manifest` by the entry point in this package's metadata, and asks every plugin for it at each start:
what is heavy is imported with the model.
"""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """What lmms-eval's registry wants to know of the model (a `ModelManifest`)."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="vlcache", chat_class_path=f"{__name__}.model.VLCacheModel")
