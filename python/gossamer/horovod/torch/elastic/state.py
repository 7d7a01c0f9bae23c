# The state of torch training: models, optimizers and samplers by handlers that know how each is saved, restored and
# synchronised; anything else as plain objects. What is communicated goes through the face's own broadcasts.
"""``TorchState`` and the handlers of its parts."""

import copy
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer.horovod.common.elastic import ObjectState
from gossamer.horovod.torch.elastic.sampler import ElasticSampler
from gossamer.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from gossamer.horovod.torch.mpi_ops import rank


class StateHandler:
    """How one kind of object is kept: by copies of its state_dict(). A subclass says how it is synchronised."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # Optimizers keep the tensors that they are given.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        raise NotImplementedError(f"{type(self).__name__}.sync: a handler must say how it is synchronised")

    def set_value(self, value: Any) -> None:
        """Another object in its place; its state is saved."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Of an nn.Module."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """Of an Optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """Of an ElasticSampler."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0))
        self.save()


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (nn.Module, ModelStateHandler),
    (Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Pairs of a class and the handler of its objects. The first that fits an object is its handler."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replaces it, for states that are made afterwards."""
    global _handler_registry
    _handler_registry = registry


class TorchState(ObjectState):
    """A state of a model, an optimizer and other objects, which are its attributes.

    Args:
        model: whose state_dict() is kept.
        optimizer: the same.
        kwargs: further attributes. Modules, optimizers and samplers among them are kept like those two, others as
            plain objects.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs |= {
            name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None
        }
        handlers = {name: handler for name, value in kwargs.items() if (handler := _handler_of(value))}
        self._handlers: dict[str, StateHandler] = handlers
        for name, handler in handlers.items():
            object.__setattr__(self, name, handler.value)
        plain = {name: value for name, value in kwargs.items() if name not in handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Samplers divide what is left among the workers that there are now."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _handler_registry if isinstance(value, kind)), None)
