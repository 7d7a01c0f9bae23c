"""CacheLoader keeps values that cost much to compute in a key-value store: in this process, or on redis servers.

Values are pickled, so whoever can write to the store can run code here. Gossamer starts no server.
"""

import logging
import pickle
from collections.abc import Callable
from typing import Any

from gossamer.bagua.torch_api.contrib.utils.redis_store import RedisStore
from gossamer.bagua.torch_api.contrib.utils.store import MemoryStore, Store
from gossamer.errors import ConfigError


class CacheLoader:
    """get(key, load_fn) gives load_fn(key), from the store if it is there.

    If the store fails, load_fn computes the value. The first failure of a loader is logged as a warning, and all
    failures are counted in `store_errors`.

    Args:
        backend: "redis", "memory" (this process alone: each worker of a DataLoader has its own), or a Store.
        dataset_name: in front of every key, so that several datasets may share a store.
        writer_buffer_size: values that are written together; flush() writes the rest. A DataLoader's worker that
            ends with values in its buffer has not written them.
        kwargs: for the store of that name: RedisStore(hosts=...).

    Raises:
        ConfigError: an unknown backend, arguments for a Store that exists, a buffer below 1; as RedisStore.
    """

    def __init__(
        self,
        backend: "str | Store" = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 1,
        **kwargs: Any,
    ) -> None:
        if writer_buffer_size < 1:
            raise ConfigError(
                f"CacheLoader: writer_buffer_size must be at least 1, got {writer_buffer_size}."
            )
        kinds: dict[Any, Callable[..., Store]] = {"redis": RedisStore, "memory": MemoryStore}
        if isinstance(backend, Store):
            if kwargs:
                raise ConfigError(f"CacheLoader: a store takes no further arguments, got {sorted(kwargs)}.")
        elif backend not in kinds:
            raise ConfigError(f"CacheLoader: backend must be 'redis', 'memory' or a Store, got {backend!r}.")
        self.backend = backend
        self.dataset_name: str = dataset_name
        self.writer_buffer_size: int = writer_buffer_size
        self.store: Store = backend if isinstance(backend, Store) else kinds[backend](**kwargs)
        self.store_errors: int = 0
        self._unwritten: dict[str, bytes] = {}

    def get(self, key: Any, load_fn: Callable[[Any], Any]) -> Any:
        """The value of `key`; load_fn(key) computes it where the store does not have it. Its errors are raised."""
        name = f"{self.dataset_name}_{key}"
        known = self._unwritten.get(name)
        if known is None:
            known = self._tried("get", lambda: self.store.get(name))
        if known is not None:
            read = self._tried("reading what get gave", lambda: [pickle.loads(known)])
            if read is not None:
                return read[0]
        value = load_fn(key)
        self._unwritten[name] = pickle.dumps(value)
        if len(self._unwritten) >= self.writer_buffer_size:
            self.flush()
        return value

    def flush(self) -> None:
        """Writes the values that wait in the buffer."""
        waiting, self._unwritten = self._unwritten, {}
        if waiting:
            self._tried("mset", lambda: self.store.mset(waiting))

    def num_keys(self) -> int:
        """Number of keys in the store, other users' too. Raises what the store raises."""
        return self.store.num_keys()

    def _tried(self, what: str, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except Exception as error:  # each kind of store has errors of its own; unpickling may raise anything
            self.store_errors += 1
            if self.store_errors == 1:
                logging.getLogger("gossamer").warning(
                    "CacheLoader: %s failed on %r and values are computed instead; further failures are only counted, "
                    "in store_errors: %s: %s",
                    what,
                    self.store,
                    type(error).__name__,
                    error,
                )
            return None
