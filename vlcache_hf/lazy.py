"""`pixel_values` that are computed when somebody looks at them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .keys import pixel_digest

_COPIES = {torch.ops.aten._to_copy.default}
_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class PixelPart:
    """The patches of one image, or what it takes to make them.

    Args:
        grid (`tuple[int, int, int]`): its `image_grid_thw` row.
        width (`int`): values per patch.
        dtype (`torch.dtype`): of the values that the processor makes.
        digests (`dict[str, str]`): known `pixel_digest`s by dtype.
        compute (`Callable[[], torch.Tensor]`): makes the patches, `(t * h * w, width)`, on the CPU.
        learned (`Callable[[dict[str, str], bool], None]`): told the digests when one has been computed, and whether
            those known before were wrong.
    """

    def __init__(
        self,
        grid: tuple[int, int, int],
        width: int,
        dtype: torch.dtype,
        digests: dict[str, str],
        compute: Callable[[], torch.Tensor],
        learned: Callable[[dict[str, str], bool], None],
    ) -> None:
        self.grid, self.width, self.dtype = grid, width, dtype
        self._digests, self._compute, self._learned = digests, compute, learned
        self._pixels: torch.Tensor | None = None
        self._lock = threading.Lock()
        self.changed = False  # whether its patches turned out to be others than those that are known

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def computed(self) -> bool:
        """Whether its patches are in memory."""
        return self._pixels is not None

    def pixels(self) -> torch.Tensor:
        """Its patches. Nobody writes to them."""
        with self._lock:
            if self._pixels is None:
                # under inference mode the caller could not train on them later, as on what the processor makes
                with torch.inference_mode(False), torch.no_grad():
                    pixels = self._compute()
                if tuple(pixels.shape) != (self.patches, self.width) or pixels.dtype != self.dtype:
                    raise RuntimeError(
                        f"The processor made patches of shape {tuple(pixels.shape)} and {pixels.dtype} where "
                        f"{(self.patches, self.width)} and {self.dtype} were known: its code has changed. Remove the "
                        "entries with `vlcache clear --kind src`."
                    )
                self._pixels = pixels
                true = {name: self._digest_of(pixels, name) for name in self._digests}
                if true != self._digests:
                    self.changed = True  # another machine may round in another way
                    self._digests = true
                    self._learned(dict(true), True)
            return self._pixels

    def digest(self, dtype: torch.dtype) -> str:
        """The `pixel_digest` of its patches in a dtype."""
        name = str(dtype)
        if name not in self._digests:
            self._digests[name] = self._digest_of(self.pixels(), name)
            self._learned(dict(self._digests), False)
        return self._digests[name]

    def _digest_of(self, pixels: torch.Tensor, dtype: str) -> str:
        return pixel_digest(pixels.to(getattr(torch, dtype.removeprefix("torch."))), self.grid)


class _Content:
    """What all aliases of a `LazyPixels` share."""

    def __init__(self, parts: Sequence[PixelPart]) -> None:
        self.parts = list(parts)
        self.thawed: torch.Tensor | None = None
        self.lock = threading.Lock()


class LazyPixels(torch.Tensor):
    """Stands in for `pixel_values`, of the same shape, dtype and device.

    Any operation of torch on it gets real values; from then on it is an ordinary tensor in all but name, whose content
    is believed and no record. The models of this library ask for digests instead, and for the patches of the images
    that they do not have.

    Args:
        parts (sequence of `PixelPart`): the images, in order.
        dtype (`torch.dtype`, *optional*): that of the parts by default.
        device (`torch.device`, *optional*): the CPU by default.
    """

    _content: _Content

    # operations arrive in `__torch_dispatch__` alone
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, parts: Sequence[PixelPart], dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> LazyPixels:
        return cls._over(_Content(parts), dtype or parts[0].dtype, device or torch.device("cpu"))

    @classmethod
    def _over(cls, content: _Content, dtype: torch.dtype, device: torch.device) -> LazyPixels:
        shape = (sum(part.patches for part in content.parts), content.parts[0].width)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._content = content
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @property
    def grids(self) -> list[list[int]] | None:
        """Grids of the images; `None` once the values have been in other hands, who may have changed them."""
        return None if self._content.thawed is not None else [list(part.grid) for part in self._content.parts]

    def digest(self, index: int) -> str:
        """`pixel_digest` of an image, for as long as there are `grids`.

        Args:
            index (`int`): which image.
        """
        return self._content.parts[index].digest(self.dtype)

    def patches(self, index: int) -> torch.Tensor:
        """The patches of one image, on the device.

        Args:
            index (`int`): which image.
        """
        return self._content.parts[index].pixels().to(self.device, self.dtype)

    def changed(self, index: int) -> bool:
        """Whether the patches of an image turned out to be others than its digest said.

        Args:
            index (`int`): which image.
        """
        return self._content.parts[index].changed

    def thaw(self) -> torch.Tensor:
        """The values as an ordinary tensor, the same one each time."""
        content = self._content
        with content.lock:
            if content.thawed is None:
                parts = [part.pixels() for part in content.parts]
                with torch.inference_mode(False), torch.no_grad():
                    whole = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
                    content.thawed = whole.to(self.device, self.dtype)
            return content.thawed

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyPixels) and first._content.thawed is None:
            if func in _ALIASES:
                return cls._over(first._content, first.dtype, first.device)
            if func in _COPIES and not kwargs.keys() - {"dtype", "device", "layout", "pin_memory", "non_blocking"}:
                dtype, device = kwargs.get("dtype") or first.dtype, kwargs.get("device") or first.device
                plain = not kwargs.get("pin_memory") and kwargs.get("layout") in (None, torch.strided)
                # a second dtype would have to remember how the first one rounded
                if plain and first.dtype in (dtype, first._content.parts[0].dtype):
                    # of its own: what is done to a copy does not reach the original
                    return cls._over(_Content(first._content.parts), dtype, torch.device(device))
        real = tree_map(lambda value: value.thaw() if isinstance(value, LazyPixels) else value, (args, kwargs))
        result = func(*real[0], **real[1])
        # an operation in place returns what it was given
        return first if isinstance(first, LazyPixels) and result is first._content.thawed else result

    def numpy(self, *, force: bool = False) -> Any:
        return self.thaw().numpy(force=force)

    def tolist(self) -> Any:
        return self.thaw().tolist()

    def data_ptr(self) -> int:
        return self.thaw().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.thaw().untyped_storage()

    def __array__(self, dtype: Any = None) -> Any:
        return self.thaw().numpy() if dtype is None else self.thaw().numpy().astype(dtype)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.thaw().__dlpack__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if self._content.thawed is not None:
            return self._content.thawed.clone()
        return type(self)._over(_Content(self._content.parts), self.dtype, self.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.thaw().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyPixels(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"
