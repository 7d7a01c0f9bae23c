"""A store on redis servers that run already. It starts none, and ends none."""

from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.bagua.torch_api.contrib.utils.store import ClusterStore, Store
from gossamer.errors import ConfigError

SERVER_CAPACITY = 107_374_182_400  # bytes; Bagua's default, for the servers that it started


class RedisServer(Store):
    """One redis server, through the package redis. Errors are that package's."""

    def __init__(self, host: str, port: int) -> None:
        """Opens no connection: the first command does. ConfigError: redis is not installed."""
        try:
            import redis
        except ImportError as error:
            raise ConfigError(
                f"RedisStore: needs the package redis ({error}); run `pip install redis`, "
                f"or take backend='memory'."
            ) from error
        self._address = f"{host}:{port}"
        self._client: Any = redis.Redis(host=host, port=port)

    def set(self, key: str, value: bytes) -> None:
        self._client.set(key, value)

    def get(self, key: str) -> bytes | None:
        value: bytes | None = self._client.get(key)
        return value

    def mset(self, dictionary: Mapping[str, bytes]) -> None:
        self._client.mset(dict(dictionary))

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        return list(self._client.mget(list(keys)))

    def num_keys(self) -> int:
        return int(self._client.dbsize())

    def clear(self) -> None:
        self._client.flushdb()

    def status(self) -> bool:
        return bool(self._client.ping())

    def shutdown(self) -> None:
        """Closes the connection; the server goes on."""
        self._client.close()

    def __repr__(self) -> str:
        return f"RedisServer({self._address})"


class RedisStore(ClusterStore):
    """The keys of all servers in `hosts` together.

    Args:
        hosts: [{"host": "10.0.0.1", "port": 6379}, ...], in the same order on all ranks.
        cluster_mode: keys are spread over all servers. False: there is one, such as one for each machine.
        capacity_per_node: Bagua's, for servers that it started. A running server has its own, `maxmemory`.

    Raises:
        ConfigError: no hosts, a host without name or port, several with cluster_mode=False, a capacity given,
            or the package redis is missing.
    """

    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int = SERVER_CAPACITY,
    ) -> None:
        if not hosts:
            raise ConfigError(
                "RedisStore: hosts must name running servers, got none: no server is started here. "
                "Start redis-server yourself, or take backend='memory'."
            )
        if any(not {"host", "port"} <= set(host) for host in hosts):
            raise ConfigError(f"RedisStore: each of hosts must have 'host' and 'port', got {list(hosts)}.")
        if not cluster_mode and len(hosts) > 1:
            raise ConfigError(f"RedisStore: cluster_mode=False takes one host, got {len(hosts)}.")
        if capacity_per_node != SERVER_CAPACITY:
            raise ConfigError(
                f"RedisStore: capacity_per_node cannot be set on a running server, got {capacity_per_node}; "
                f"set its maxmemory."
            )
        super().__init__([RedisServer(host["host"], int(host["port"])) for host in hosts])
