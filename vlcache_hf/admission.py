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
        self._seen: dict[str, bool] = {}

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
        if not self.large_enough(tokens) or not self._store.accepts(nbytes):
            return False
        limit = self._options.config.second_sight_bytes
        if limit is None or nbytes <= limit:
            return True
        if key not in self._seen:
            self._seen[key] = self._store.marked(f"seen/{key}")
            if not self._seen[key]:
                self._store.mark(f"seen/{key}")
        return self._seen[key]
