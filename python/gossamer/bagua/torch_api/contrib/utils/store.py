"""Key-value stores: what one is, several as one, and one in this process."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from gossamer.errors import ConfigError


class Store(ABC):
    """Keys are text, values bytes. Errors are the store's own."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Writes one value, over another if there is one."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value of a key, None where there is none."""

    @abstractmethod
    def num_keys(self) -> int:
        """Number of keys."""

    @abstractmethod
    def clear(self) -> None:
        """Removes all keys."""

    @abstractmethod
    def status(self) -> bool:
        """True if the store answers."""

    def mset(self, dictionary: Mapping[str, bytes]) -> None:
        """Writes several values."""
        for key, value in dictionary.items():
            self.set(key, value)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of several keys, in their order, None where there is none."""
        return [self.get(key) for key in keys]

    def shutdown(self) -> None:
        """Ends what the store has opened."""


class MemoryStore(Store):
    """A dictionary in this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def num_keys(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        self._values.clear()

    def status(self) -> bool:
        return True


class ClusterStore(Store):
    """Several stores as one: each key is in one of them, the same in every process (BLAKE2b of the key).

    Args:
        stores: in the same order everywhere.

    Raises:
        ConfigError: no stores.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ConfigError("ClusterStore: needs one store at least, got none.")
        self.stores: list[Store] = list(stores)

    def place(self, key: str) -> int:
        """Which of the stores a key belongs to."""
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % len(self.stores)

    def set(self, key: str, value: bytes) -> None:
        self.stores[self.place(key)].set(key, value)

    def get(self, key: str) -> bytes | None:
        return self.stores[self.place(key)].get(key)

    def mset(self, dictionary: Mapping[str, bytes]) -> None:
        for store, keys in self._by_store(dictionary):
            store.mset({key: dictionary[key] for key in keys})

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        values: dict[str, bytes | None] = {}
        for store, part in self._by_store(keys):
            values |= zip(part, store.mget(part), strict=True)
        return [values[key] for key in keys]

    def _by_store(self, keys: Iterable[str]) -> Iterator[tuple[Store, list[str]]]:
        for place, part in groupby(sorted(keys, key=self.place), self.place):
            yield self.stores[place], list(part)

    def num_keys(self) -> int:
        return sum(store.num_keys() for store in self.stores)

    def clear(self) -> None:
        for store in self.stores:
            store.clear()

    def status(self) -> bool:
        return all(store.status() for store in self.stores)

    def shutdown(self) -> None:
        for store in self.stores:
            store.shutdown()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.stores})"
