"""Checksums of what lies on disk: one per mebibyte of a tensor, so that a part of it can be checked by itself."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

import torch
import xxhash

from .forks import renew_in_children

BLOCK_BYTES = 1 << 20
_DIGITS = 16
_FILES = 4096  # of which it is remembered what was checked


def num_blocks(nbytes: int) -> int:
    """Number of blocks of a tensor of `nbytes` bytes."""
    return (nbytes + BLOCK_BYTES - 1) // BLOCK_BYTES


def blocks(start: int, stop: int) -> range:
    """The blocks that hold the bytes `[start, stop)` of a tensor."""
    return range(start // BLOCK_BYTES, num_blocks(stop))


def placeholder(nbytes: int) -> str:
    """Text of the length that the checksums of `nbytes` bytes will have."""
    return "0" * (_DIGITS * num_blocks(nbytes))


class BlockSums:
    """Checksums of a stream of bytes, block by block."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._block = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        while data.nbytes:
            part = data[: BLOCK_BYTES - self._filled]
            self._block.update(part)
            self._filled += part.nbytes
            data = data[part.nbytes :]
            if self._filled == BLOCK_BYTES:
                self._finish()

    def hex(self) -> str:
        """All checksums in order, 16 hexadecimal digits each."""
        if self._filled:
            self._finish()
        return "".join(self._done)

    def _finish(self) -> None:
        self._done.append(self._block.hexdigest())
        self._block.reset()
        self._filled = 0


class Verified:
    """Which blocks of which files this process has checked. Files are never changed in place, so once is enough, as
    long as a file's time is the one that this process has seen or set: whatever else touched it may have written."""

    def __init__(self) -> None:
        self.after_fork()
        renew_in_children(self)

    def after_fork(self) -> None:
        """Starts anew: what was checked may have been half noted, and it costs little to check again."""
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[int, ...], tuple[str, dict[str, set[int]]]] = OrderedDict()

    def of(self, file: tuple[int, ...], serial: str) -> dict[str, set[int]]:
        """The blocks of a file that were found good, by tensor; callers add to it.

        Args:
            file (`tuple[int, ...]`): what identifies the file among those that are there.
            serial (`str`): what tells it from those that are gone, whose inode it may have.
        """
        with self._lock:
            if self._files.get(file, ("", {}))[0] != serial:
                self._files[file] = (serial, {})
            known = self._files[file][1]
            self._files.move_to_end(file)
            while len(self._files) > _FILES:
                self._files.popitem(last=False)
            return known

    def moved(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        """This process has set the time of a file: what was checked stays checked."""
        with self._lock:
            known = self._files.pop(before, None)
            if known is not None:
                self._files[after] = known


def bad_blocks(tensor: torch.Tensor, start: int, stop: int, sums: str, checked: set[int]) -> Iterator[int]:
    """Checks the blocks that hold some bytes of a tensor.

    Args:
        tensor (`torch.Tensor`): the whole tensor, contiguous, on the CPU.
        start (`int`), stop (`int`): which of its bytes are about to be used.
        sums (`str`): the checksums of all its blocks.
        checked (`set[int]`): blocks that need no check; those found good are added.

    Returns:
        `Iterator[int]`: the blocks that do not have the checksum they should have.
    """
    data = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
    for block in blocks(start, stop):
        if block in checked:
            continue
        part = data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        if xxhash.xxh3_64(part).hexdigest() == sums[block * _DIGITS : (block + 1) * _DIGITS]:
            checked.add(block)
        else:
            yield block
