"""BaguaStrategy: the class of Lightning 1.6 to 1.9, on the Bagua face. A mixin; see gossamer.lightning.pytorch."""

from typing import Any

from gossamer.bagua.torch_api import communication
from gossamer.bagua.torch_api.algorithms import Algorithm, GlobalAlgorithmRegistry
from gossamer.bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from gossamer.bagua.torch_api.data_parallel import DistributedDataParallel
from gossamer.errors import ConfigError
from gossamer.lightning.keywords import require_keywords
from gossamer.lightning.trainer import Wrapping

ALGORITHMS = (
    "gradient_allreduce",
    "bytegrad",
    "decentralized",
    "low_precision_decentralized",
    "qadam",
    "async",
)


class BaguaStrategy(Wrapping):
    """Trains with one of Bagua's algorithms, with Bagua's names and arguments, on CPUs or GPUs.

    Args:
        algorithm: gradient_allreduce, bytegrad, decentralized, low_precision_decentralized, qadam or async.
        flatten: do_flatten of with_bagua(). It changes nothing: the buckets of these algorithms are flat.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in Lightning's
            DDPStrategy.
        bagua_kwargs: arguments of the algorithm. qadam takes its optimizer from the LightningModule.

    Raises:
        ConfigError: The algorithm is unknown.
        TypeError: The algorithm does not have an argument of bagua_kwargs.
    """

    def __init__(
        self,
        algorithm: str = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **bagua_kwargs: Any,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        if algorithm not in ALGORITHMS:
            raise ConfigError(
                f"BaguaStrategy: algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}"
            )
        self._algorithm, self._flatten, self._kwargs = algorithm, flatten, bagua_kwargs
        declared = GlobalAlgorithmRegistry.get(algorithm)
        needs_optimizer = algorithm == "qadam"  # its first argument, which configure_optimizers() gives
        require_keywords(type(self), declared, bagua_kwargs, taken=int(needs_optimizer))
        if not needs_optimizer:
            Algorithm.init(algorithm, **bagua_kwargs)  # raises for wrong values here, and not in the workers

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As Collective.reduce(), but None is the mean, as it was in Lightning 1.9."""
        return super().reduce(tensor, group, "mean" if reduce_op is None else reduce_op)

    def setup_distributed(self) -> None:
        super().setup_distributed()
        if not communication.is_initialized():
            communication.init_process_group()  # for calls to Bagua in the user's module

    def wrap(self, model: Any) -> DistributedDataParallel:
        return DistributedDataParallel(
            model,
            gradient_as_bucket_view=self._flatten,
            optimizers=self.optimizers,
            algorithm=self._declared(),
        )

    def _declared(self) -> Algorithm:
        if self._algorithm != "qadam":
            return Algorithm.init(self._algorithm, **self._kwargs)
        single = len(self.optimizers) == 1 and isinstance(self.optimizers[0], QAdamOptimizer)
        if not single or len(self.lr_scheduler_configs) > 1:
            raise self.misconfiguration(
                "Bagua QAdam can only accept one QAdamOptimizer and one LR Scheduler."
            )
        return Algorithm.init("qadam", q_adam_optimizer=self.optimizers[0], **self._kwargs)

    def unwrap(self, wrapper: Any, *, crashed: bool) -> None:
        wrapper.inner.close(crashed=crashed)
