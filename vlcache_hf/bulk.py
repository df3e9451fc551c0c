"""Digests of many bytes, at the speed of the memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import blake3
import torch

BLOCK_BYTES = 4 << 20
MAX_THREADS = 8  # which read as fast as the memory of most machines gives


def bulk_digest(data: memoryview) -> bytes:
    """BLAKE3 of the BLAKE3 digests of all blocks of 4 MiB: the same for any number of threads.

    Several blocks are hashed at once, in as many threads as torch would compute with. They are threads of the call:
    BLAKE3's own pool does not survive a fork, and the child would wait for it for ever.

    Args:
        data (`memoryview`): contiguous bytes.
    """
    blocks = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
    digests = [b""] * len(blocks)
    stripes = max(1, min(torch.get_num_threads(), MAX_THREADS, len(blocks)))
    helpers = []
    left = [range(first, len(blocks), stripes) for first in range(stripes)]
    try:
        while len(left) > 1:
            helper = threading.Thread(target=_hash, args=(blocks, left[-1], digests), name="vlcache-hash")
            helper.start()
            helpers.append(helper)
            left.pop()
    except RuntimeError:
        pass  # no more threads are to be had
    for stripe in left:
        _hash(blocks, stripe, digests)
    for helper in helpers:
        helper.join()
    # what an exception ended in a helper, such as too little memory, is done here, or ends this call too
    _hash(blocks, [index for index, digest in enumerate(digests) if not digest], digests)
    return blake3.blake3(b"".join(digests)).digest()


def _hash(blocks: Sequence[memoryview], stripe: Sequence[int], digests: list[bytes]) -> None:
    for index in stripe:
        digests[index] = blake3.blake3(blocks[index]).digest()
