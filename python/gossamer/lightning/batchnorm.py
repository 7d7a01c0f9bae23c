"""Trainer(sync_batchnorm=True) on CPUs, by the Bagua face's SyncBatchNorm: torch's works on GPUs only."""

from torch import nn

from gossamer.bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm


class JoinedBatchNorm:
    """A LayerSync of Lightning, which calls apply() when a fit begins and revert() when it ends."""

    def __init__(self) -> None:
        self._originals: list[tuple[str, nn.Module]] = []

    def apply(self, model: nn.Module) -> nn.Module:
        """Replace every BatchNorm in the model, in place. Parameters stay the same objects."""
        before = dict(model.named_modules(remove_duplicate=False))
        SyncBatchNorm.convert_sync_batchnorm(model)
        now = model.named_modules(remove_duplicate=False)
        self._originals = [(path, before[path]) for path, module in now if module is not before[path]]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Put the original BatchNorms back, with the trained parameters and buffers."""
        for path, original in self._originals:
            trained = model.get_submodule(path)
            for name, value in [*trained._parameters.items(), *trained._buffers.items()]:
                setattr(original, name, value)
            original.train(trained.training)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, original)
        self._originals = []
        return model
