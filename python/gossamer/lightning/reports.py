"""A callback for either Trainer that logs where its steps go: the figures of gs.report(), to the loggers it has."""

from typing import Any

from gossamer.engine import report_all
from gossamer.errors import ConfigError
from gossamer.lightning.namespaces import Base
from gossamer.observe.report import Reports


class ReportCallback(Base):
    """Logs `gossamer/step_ms`, `gossamer/exposed_ms` and the other figures of gs.report() of rank 0 while fitting.

    Each point is over the steps since the one before, 100 at most: the counters begin anew with it.

    Args:
        every_n_steps: optimizer steps between two points.

    Raises:
        ConfigError: fewer than one step; in fit(), a Trainer without a logger, or whose strategy is none of Gossamer's.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"ReportCallback: every_n_steps must be at least 1, got {every_n_steps}")
        super().__init__()
        self.every_n_steps = every_n_steps
        self._logged = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Looks whether there is a logger; counts steps from here."""
        if not trainer.loggers:
            raise ConfigError(
                "ReportCallback: the Trainer must have a logger, got none; give it one, such as TensorBoardLogger"
            )
        self._logged = trainer.global_step
        report_all(reset=True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs, if it is time."""
        if trainer.global_step - self._logged < self.every_n_steps:
            return
        self._logged = trainer.global_step
        reports = Reports(
            each for each in report_all(reset=True) if each["steps"]
        )  # models that rest say nothing
        if not reports:
            raise ConfigError(
                f"ReportCallback: the strategy must be one that averages through Gossamer, got "
                f"{type(trainer.strategy).__name__}; use strategy='gossamer', 'bagua' or 'horovod'"
            )
        for logger in trainer.loggers:
            logger.log_metrics(reports.scalars(), step=trainer.global_step)
