"""Attention: the function registered as `"vlcache"`, and the kernels behind it."""

from .interface import NAME, register

__all__ = ["NAME", "register"]
