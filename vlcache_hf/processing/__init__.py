"""The processor's fast path: an image that is known is not decoded, resized or cut into patches again."""

from .attach import VLCacheProcessor, attach_processor

__all__ = ["VLCacheProcessor", "attach_processor"]
