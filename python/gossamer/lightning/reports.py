"""A callback for either Trainer that logs the figures of gs.report()."""

from typing import Any

from gossamer.engine import report_all
from gossamer.errors import ConfigError
from gossamer.lightning.namespaces import Base
from gossamer.observe.report import Reports


class ReportCallback(Base):
    """Logs rank 0's figures of gs.report() during fit(), such as `gossamer/step_ms` and `gossamer/exposed_ms`.

    Each point covers the steps since the previous one, but at most 100. The counters then begin anew.

    Args:
        every_n_steps: optimizer steps between two points.

    Raises:
        ConfigError: every_n_steps is less than 1; in fit(), the Trainer has no logger, or no strategy of Gossamer.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"ReportCallback: every_n_steps must be at least 1, got {every_n_steps}")
        super().__init__()
        self.every_n_steps = every_n_steps
        self._logged = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that there is a logger, and start to count."""
        if not trainer.loggers:
            raise ConfigError(
                "ReportCallback: the Trainer must have a logger, got none; give it one, such as TensorBoardLogger"
            )
        self._logged = trainer.global_step
        report_all(reset=True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a point if one is due."""
        if trainer.global_step - self._logged < self.every_n_steps:
            return
        self._logged = trainer.global_step
        # A model without a step since the last point is left out.
        reports = Reports(each for each in report_all(reset=True) if each["steps"])
        if not reports:
            raise ConfigError(
                f"ReportCallback: the strategy must be one that averages through Gossamer, got "
                f"{type(trainer.strategy).__name__}; use strategy='gossamer', 'bagua' or 'horovod'"
            )
        for logger in trainer.loggers:
            logger.log_metrics(reports.scalars(), step=trainer.global_step)
