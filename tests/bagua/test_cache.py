# CacheLoader, CachedDataset and the stores. A module of dictionaries stands for the redis package.

import logging
import subprocess
import sys
import types

import pytest
import torch

import gossamer as gs
from gossamer.bagua.torch_api.contrib import CachedDataset, CacheLoader
from gossamer.bagua.torch_api.contrib.utils.redis_store import RedisStore
from gossamer.bagua.torch_api.contrib.utils.store import ClusterStore, MemoryStore, Store

HOSTS = [{"host": "a", "port": 1}, {"host": "b", "port": "2"}]


class Redis:
    """The part of redis.Redis that is used; servers outlive their clients."""

    servers: dict[tuple[str, int], dict[bytes, bytes]]

    def __init__(self, *, host: str, port: int) -> None:
        self.values = self.servers.setdefault((host, port), {})

    def set(self, key: str, value: bytes) -> None:
        self.values[key.encode()] = value

    def get(self, key: str) -> bytes | None:
        return self.values.get(key.encode())

    def mset(self, mapping: dict[str, bytes]) -> None:
        for key, value in mapping.items():
            self.set(key, value)

    def mget(self, keys: list[str]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def dbsize(self) -> int:
        return len(self.values)

    def flushdb(self) -> None:
        self.values.clear()

    def ping(self) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.fixture
def servers(monkeypatch) -> dict:
    Redis.servers = {}
    monkeypatch.setitem(sys.modules, "redis", types.SimpleNamespace(Redis=Redis))
    return Redis.servers


class Broken(MemoryStore):
    """Fails while `down`."""

    def __init__(self) -> None:
        super().__init__()
        self.down = True

    def get(self, key: str) -> bytes | None:
        return super().get(key) if not self.down else self._fail()

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value) if not self.down else self._fail()

    def _fail(self):
        raise OSError("no route to store")


def check_store(store: Store) -> None:
    assert store.status()
    assert store.num_keys() == 0
    assert store.get("absent") is None
    values = {f"key{number}": bytes([number]) * number for number in range(50)}
    store.mset(values)
    store.set("one", b"1")
    store.set("one", b"2")
    assert store.num_keys() == 51
    assert store.get("one") == b"2"
    assert store.get("key0") == b""
    keys = ["key3", "absent", "key49", "key3"]
    assert store.mget(keys) == [values.get(key) for key in keys]
    store.clear()
    assert (store.num_keys(), store.get("one")) == (0, None)
    store.shutdown()


def test_stores_keep_what_they_are_given(servers) -> None:
    check_store(MemoryStore())
    check_store(ClusterStore([MemoryStore() for _ in range(3)]))
    check_store(RedisStore(HOSTS))
    check_store(RedisStore(HOSTS[:1], cluster_mode=False))
    assert set(servers) == {("a", 1), ("b", 2)}


def test_cluster_spreads_keys_alike_in_every_process() -> None:
    cluster = ClusterStore([MemoryStore() for _ in range(4)])
    keys = [f"data_{number}" for number in range(2000)]
    places = [cluster.place(key) for key in keys]
    assert all(400 < places.count(place) < 600 for place in range(4))
    code = (
        "from gossamer.bagua.torch_api.contrib.utils.store import *; c = ClusterStore([MemoryStore()] * 4);"
        "print(*(c.place(f'data_{n}') for n in range(2000)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True
    )
    assert [int(place) for place in done.stdout.split()] == places


def test_values_are_computed_once_for_all_loaders_of_a_store(servers) -> None:
    calls = []

    def square(number: int) -> torch.Tensor:
        calls.append(number)
        return torch.tensor([number**2])

    loaders = [CacheLoader(dataset_name=name, hosts=HOSTS) for name in ("squares", "squares", "others")]
    for loader in loaders[:2]:
        assert [loader.get(number, square).item() for number in (3, 4, 3)] == [9, 16, 9]
    assert calls == [3, 4]
    loaders[2].get(3, square)  # another dataset's key of that number
    assert calls == [3, 4, 3]
    assert loaders[0].num_keys() == 3
    assert all(loader.store_errors == 0 for loader in loaders)


def test_buffer_is_written_when_full_or_flushed_and_read_before() -> None:
    store, calls = MemoryStore(), []
    loader = CacheLoader(store, writer_buffer_size=3)
    for key in ("a", "b", "a"):
        loader.get(key, lambda name: calls.append(name) or name)
    assert (store.num_keys(), calls) == (0, ["a", "b"])
    loader.get("c", str)
    assert store.num_keys() == 3
    loader.get("d", str)
    loader.flush()
    assert store.num_keys() == 4
    loader.flush()


def test_none_and_empty_values_are_values() -> None:
    loader, calls = CacheLoader("memory"), []
    for _ in range(2):
        assert loader.get("none", calls.append) is None
        assert loader.get("empty", lambda key: calls.append(key) or b"") == b""
    assert calls == ["none", "empty"]


def test_failing_store_is_logged_once_counted_and_recovered_from(caplog) -> None:
    store = Broken()
    loader = CacheLoader(store)
    with caplog.at_level(logging.WARNING, "gossamer"):
        assert [loader.get(key, len) for key in ("a", "bb")] == [1, 2]
    assert loader.store_errors == 4  # two reads and two writes
    assert len(caplog.records) == 1
    assert "get failed" in caplog.text
    assert "no route to store" in caplog.text
    store.down = False
    assert loader.get("a", len) == 1
    assert loader.get("a", lambda key: 1 / 0) == 1
    store.set("_damaged", b"no pickle")
    assert loader.get("damaged", len) == 7
    assert loader.store_errors == 5
    assert loader.get("damaged", lambda key: 1 / 0) == 7


def test_errors_of_load_fn_are_raised_and_nothing_is_stored() -> None:
    loader = CacheLoader("memory")
    with pytest.raises(ZeroDivisionError):
        loader.get("a", lambda key: 1 / 0)
    assert (loader.num_keys(), loader.store_errors) == (0, 0)


class Squares(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.read = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, item: int) -> int:
        self.read.append(item)
        return item**2


def test_cached_dataset_reads_each_sample_once() -> None:
    squares = Squares()
    cached = CachedDataset(squares, "memory", "squares", 4)
    for _ in range(2):
        loader = torch.utils.data.DataLoader(cached, batch_size=5)
        assert torch.cat(list(loader)).tolist() == [n**2 for n in range(10)]
    assert (len(cached), squares.read) == (10, list(range(10)))


def test_missing_redis_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(gs.ConfigError, match="needs the package redis .*pip install redis.*backend='memory'"):
        CacheLoader(hosts=HOSTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "hosts must name running servers, got none: no server is started here"),
        ({"hosts": []}, "hosts must name running servers"),
        ({"hosts": [{"host": "a"}]}, r"must have 'host' and 'port', got \[{'host': 'a'}\]"),
        ({"hosts": HOSTS, "cluster_mode": False}, "cluster_mode=False takes one host, got 2"),
        (
            {"hosts": HOSTS, "capacity_per_node": 5},
            "capacity_per_node cannot be set on a running server, got 5",
        ),
        ({"backend": "lmdb"}, "backend must be 'redis', 'memory' or a Store, got 'lmdb'"),
        ({"backend": MemoryStore(), "hosts": HOSTS}, r"a store takes no further arguments, got \['hosts'\]"),
        ({"backend": "memory", "writer_buffer_size": 0}, "writer_buffer_size must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(servers, options, message) -> None:
    with pytest.raises(gs.ConfigError, match=message):
        CacheLoader(**options)


def test_cluster_without_stores_is_refused() -> None:
    with pytest.raises(gs.ConfigError, match="needs one store at least"):
        ClusterStore([])
