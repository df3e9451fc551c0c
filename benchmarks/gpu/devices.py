"""CUDA or CPU: waiting, memory, and what the machine is."""

from __future__ import annotations

import gc
import platform

import torch


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_peak(device: torch.device) -> None:
    """Starts a new peak of allocated memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """The peak of allocated memory since `start_peak`; `None` on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def release(device: torch.device) -> None:
    """Gives the memory of dead objects back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def describe(device: torch.device) -> str:
    """The machine, in words."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
