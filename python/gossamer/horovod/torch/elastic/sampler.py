"""``hvd.elastic.ElasticSampler``: gs.ElasticSampler among the workers of hvd.init()."""

from gossamer import sampler
from gossamer.horovod.torch.mpi_ops import rank, size


class ElasticSampler(sampler.ElasticSampler):
    """gs.ElasticSampler, which divides what is left of a dataset among the workers of hvd.init()."""

    def place(self) -> tuple[int, int]:
        """Returns this worker's rank, and the number of workers."""
        return rank(), size()
