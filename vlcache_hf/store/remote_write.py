"""Writing an entry to a server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from .entry import BadEntryError
from .remote_entry import MAX_DESCRIPTION_BYTES, Description, TensorSpec, decode_description, pack
from .remote_keys import META, TENSOR, checked, hash_key, names_key, new_key, refresh

_UNFINISHED_TTL_S = 900  # what a killed writer leaves behind

Call = Callable[..., list[Any]]


def write_entry(
    call: Call,
    kind: str,
    group: str,
    name: str,
    tensors: dict[str, torch.Tensor],
    fields: dict[str, str],
    ttl_s: int,
) -> None:
    """
    Makes an entry be on the server: readers see it when it is complete. One that is there already is not sent again.

    Args:
        call (`Callable[..., list[Any]]`): `Link.call`.
        kind, group, name (`str`): its key.
        tensors (`dict[str, torch.Tensor]`): on the CPU.
        fields (`dict[str, str]`): kept beside them.
        ttl_s (`int`): seconds until it expires.

    Raises:
        `NonFiniteError`: when a value is NaN or infinite.
        `Exception`: it was not stored.
    """
    key = hash_key(kind, group, name)
    with contextlib.suppress(BadEntryError):  # a bad one is replaced
        (reply,) = call([("HGET", key, META)], limit=MAX_DESCRIPTION_BYTES)
        known = decode_description(reply, kind, group, name).tensors
        if _alike(known, tensors) and checked(call(refresh(kind, group, name, ttl_s)))[0]:
            return
    new = new_key(kind, group)
    specs: dict[str, TensorSpec] = {}
    try:
        for label, tensor in tensors.items():
            data, specs[label] = pack(tensor)
            checked(call([("HSET", new, TENSOR + label, data), ("EXPIRE", new, _UNFINISHED_TTL_S)], data.nbytes))
        meta = Description(kind, group, name, fields, specs).encode()
        if len(meta) > MAX_DESCRIPTION_BYTES:
            raise ValueError(f"the description of an entry has {len(meta)} bytes")
        # counts what has arrived: the server may have evicted the unfinished entry meanwhile
        added, count = checked(call([("HSET", new, META, meta), ("HLEN", new)], len(meta)))
        if (added, count) != (1, len(specs) + 1):
            raise RuntimeError("the server lost a part of a new entry")
        stale = ("ZREMRANGEBYSCORE", names_key(kind, group), "-inf", time.time() - ttl_s)
        publish = [("MULTI",), ("RENAME", new, key), *refresh(kind, group, name, ttl_s), stale, ("EXEC",)]
        checked(checked(call(publish))[-1])
    except BaseException:
        with contextlib.suppress(Exception):  # else it expires
            call([("UNLINK", new)])
        raise


def _alike(known: dict[str, TensorSpec], tensors: dict[str, torch.Tensor]) -> bool:
    wanted = {label: (tensor.dtype, tuple(tensor.shape)) for label, tensor in tensors.items()}
    return wanted == {label: (spec.dtype, spec.shape) for label, spec in known.items()}
