"""Memory of the host that GPUs read and write by themselves."""

from __future__ import annotations

import torch


class HostMemory:
    """Makes copies of tensors on the CPU, pinned until that fails: systems limit how much memory may be locked.

    Args:
        pins (`bool`): whether to try, which takes CUDA.
    """

    def __init__(self, pins: bool) -> None:
        self._pins = pins

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy. One of a GPU's tensor in pinned memory is still under way when this returns.

        Args:
            tensor (`torch.Tensor`): on any device.
        """
        if self._pins:
            try:
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            except RuntimeError:
                self._pins = False
            else:
                return pinned.copy_(tensor, non_blocking=True)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
