"""GossamerStrategy: a LightningModule in gossamer.DataParallel. A mixin; see gossamer.lightning.pytorch."""

from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from gossamer.algorithms import ALGORITHMS, Algorithm, resolve
from gossamer.comm import Hierarchical
from gossamer.data_parallel import DataParallel
from gossamer.engine import Autotune
from gossamer.errors import ConfigError
from gossamer.lightning.trainer import Wrapping


class Choice:
    """The algorithm that a strategy was given, and how models are wrapped with it.

    Args:
        algorithm: an Algorithm, or its name.
        arguments: of the class of that name.
        options: of DataParallel.
        hierarchical: exact inside hosts, through the codec between them.
    """

    def __init__(
        self,
        algorithm: str | Algorithm,
        arguments: dict[str, Any],
        options: dict[str, Any],
        hierarchical: bool,
    ) -> None:
        if arguments and not (isinstance(algorithm, str) and algorithm in ALGORITHMS):
            raise ConfigError(
                f"GossamerStrategy: arguments of an algorithm need its name, one of {', '.join(sorted(ALGORITHMS))}, "
                f"got {algorithm!r} and {arguments}"
            )
        self._algorithm, self._arguments = algorithm, arguments
        self._options, self._hierarchical = options, hierarchical
        self._make()  # refuses wrong arguments here, and not in the workers

    def wrap(self, module: Any, optimizers: Any) -> DataParallel:
        """Collective."""
        group = Hierarchical() if self._hierarchical else None
        return DataParallel(module, optimizers, algorithm=self._make(), process_group=group, **self._options)

    def _make(self) -> Algorithm:
        if isinstance(self._algorithm, str) and self._arguments:
            return ALGORITHMS[self._algorithm](**self._arguments)
        return resolve(self._algorithm)


class GossamerStrategy(Wrapping):
    """Trains with one of Gossamer's algorithms, on CPUs or GPUs; one process for each device.

    Args:
        algorithm: an Algorithm, or its name, such as "bytegrad".
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
        timeout, start_method: as of Lightning's DDPStrategy. The backend is "gossamer" for CPUs by default, and
            "cpu:gossamer,cuda:nccl" for GPUs.
        bucket_bytes, first_bucket_bytes, autotune: as of gossamer.DataParallel.
        hierarchical: gradients are compressed between hosts, and exact inside one: gossamer.Hierarchical().
        algorithm_kwargs: arguments of the algorithm of that name.

    Raises:
        ConfigError: an unknown algorithm, or arguments with an Algorithm.
        TypeError: arguments that the algorithm does not have.
    """

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        *,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: str = "popen",
        bucket_bytes: int | None = None,
        first_bucket_bytes: int | None = None,
        autotune: bool | Autotune = False,
        hierarchical: bool = False,
        **algorithm_kwargs: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        options = {
            "bucket_bytes": bucket_bytes,
            "first_bucket_bytes": first_bucket_bytes,
            "autotune": autotune,
        }
        self._choice = Choice(algorithm, algorithm_kwargs, options, hierarchical)

    def wrap(self, model: Any) -> DataParallel:
        return self._choice.wrap(model, self.optimizers)

    def unwrap(self, wrapper: Any, *, crashed: bool) -> None:
        wrapper.engine.close(crashed=crashed)

    @property
    def running(self) -> Algorithm:
        """The Algorithm at work, during fit()."""
        if self.wrapper is None:
            raise ConfigError("GossamerStrategy: an algorithm is at work during fit() only")
        algorithm: Algorithm = self.wrapper.algorithm
        return algorithm

    def abort(self, wrapper: Any) -> None:
        if hasattr(wrapper.algorithm, "abort"):
            wrapper.algorithm.abort()

    def resume(self, wrapper: Any) -> None:
        if hasattr(wrapper.algorithm, "resume"):
            wrapper.algorithm.resume()

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self.wrapper is None or self.lightning_module.automatic_optimization:
            return
        # By hand there may be several steps in one training_step(), and only that goes through the wrapper. Where ranks
        # do not meet in every step, weights may change here, which the forward that has been must not see.
        engine = self.wrapper.engine
        if engine.algorithm.lockstep:
            engine.before_forward()
        engine.after_forward(closure_loss)
