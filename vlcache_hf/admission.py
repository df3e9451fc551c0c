"""Which images are worth storing."""

from __future__ import annotations

from .options import Options


class Admission:
    """Decides for one request, once per entry, what is looked up and what is stored.

    Args:
        options (`Options`): store and settings of the request.
    """

    def __init__(self, options: Options) -> None:
        self._options, self._store = options, options.store
        self._decided: dict[str, bool] = {}

    def large_enough(self, tokens: int) -> bool:
        """Whether an image has the tokens from which on it is looked up and stored at all."""
        return tokens >= self._options.min_tokens

    def stores(self, key: str, tokens: int, nbytes: int) -> bool:
        """Whether an entry that was not found is stored; asked before anything is copied.

        Args:
            key (`str`): what is to be seen twice where the entry is large.
            tokens (`int`): tokens of the image.
            nbytes (`int`): bytes of the entry.
        """
        if not self.large_enough(tokens):
            return False
        if key not in self._decided:
            self._decided[key] = self._seen_before(key, nbytes) and self._store.accepts(nbytes)
        return self._decided[key]

    def _seen_before(self, key: str, nbytes: int) -> bool:
        limit = self._options.config.second_sight_bytes
        if limit is None or nbytes <= limit:
            return True
        seen = self._store.marked(f"seen/{key}")
        if not seen:
            self._store.mark(f"seen/{key}")
        return seen
