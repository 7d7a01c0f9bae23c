"""Trainer(sync_batchnorm=True) on CPUs, where torch's SyncBatchNorm does not run: that of the Bagua face, and back."""

from torch import nn

from gossamer.bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm


class JoinedBatchNorm:
    """A LayerSync: apply() when a model is fitted, revert() at the end."""

    def __init__(self) -> None:
        self._originals: list[tuple[str, nn.Module]] = []

    def apply(self, model: nn.Module) -> nn.Module:
        """Replaces every BatchNorm in the model, in place; parameters stay the same objects."""
        before = dict(model.named_modules(remove_duplicate=False))
        SyncBatchNorm.convert_sync_batchnorm(model)
        now = model.named_modules(remove_duplicate=False)
        self._originals = [(path, before[path]) for path, module in now if module is not before[path]]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Puts the BatchNorms back, with what they have become."""
        for path, original in self._originals:
            trained = model.get_submodule(path)
            for name, value in [*trained._parameters.items(), *trained._buffers.items()]:
                setattr(original, name, value)
            original.train(trained.training)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, original)
        self._originals = []
        return model
