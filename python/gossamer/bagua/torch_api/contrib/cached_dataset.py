"""A dataset whose samples are computed once and then come from a store."""

from typing import Any

from torch.utils.data import Dataset

from gossamer.bagua.torch_api.contrib.cache_loader import CacheLoader
from gossamer.bagua.torch_api.contrib.utils.store import Store


class CachedDataset(Dataset[Any]):
    """Keeps the samples of `dataset` in a cache, after its transforms. A random transform is so applied only once.

    Args:
        dataset: map-style.
        backend, dataset_name, writer_buffer_size, kwargs: as in CacheLoader.
    """

    def __init__(
        self,
        dataset: Any,
        backend: "str | Store" = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 20,
        **kwargs: Any,
    ) -> None:
        self.dataset = dataset
        self.cache_loader: CacheLoader = CacheLoader(backend, dataset_name, writer_buffer_size, **kwargs)

    def __getitem__(self, item: Any) -> Any:
        return self.cache_loader.get(item, self.dataset.__getitem__)

    def __len__(self) -> int:
        return len(self.dataset)
