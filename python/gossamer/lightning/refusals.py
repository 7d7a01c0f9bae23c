"""Error messages of a Trainer or Fabric for a strategy of Gossamer that it does not have.

Lightning's own text does not know Gossamer's names, nor that each class exists once for each package. Lightning offers
no place to register a message, so its check of arguments is wrapped.
"""

import difflib
import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from gossamer.errors import ConfigError

_OURS = "gossamer"


@dataclass(frozen=True)
class Refusals:
    """The refusals of one Trainer or Fabric.

    Args:
        taker: its package, such as "lightning.pytorch".
        base: the base class of its strategies.
        registry: its strategies by name.
        module: the module with Gossamer's classes for it.
        classes: the names of these classes.
    """

    taker: str
    base: type
    registry: Collection[str]
    module: str
    classes: tuple[str, ...]

    def wrap(self, connector: Any) -> None:
        """Let Lightning's class that reads the arguments call require_known() first.

        A Lightning without such a check keeps its own text.
        """
        check = getattr(connector, "_check_config_and_set_final_flags", None)
        if check is None:
            return

        @functools.wraps(check)
        def checked(connected: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
            self.require_known(strategy)
            check(connected, strategy, *args, **kwargs)

        connector._check_config_and_set_final_flags = checked

    def require_known(self, strategy: Any) -> None:
        """Raise ConfigError for an unknown name that begins with "gossamer", and for a class of another package."""
        if isinstance(strategy, str):
            self._require_name(strategy)
        elif not isinstance(strategy, self.base):
            self._require_class(type(strategy))

    def _require_name(self, name: str) -> None:
        lower = name.lower()  # as Lightning does
        if not lower.startswith(_OURS) or lower in self.registry:
            return
        ours = sorted(each for each in self.registry if each.startswith(_OURS))
        near = difflib.get_close_matches(lower, ours, 1, cutoff=0.85)
        advice = f"did you mean {near[0]!r}? " if near else ""
        plain = [each for each in ours if each + "_spawn" in ours]
        raise ConfigError(
            f"{self.taker}: invalid strategy name {name!r}; {advice}Gossamer's are {', '.join(plain)}; and each with "
            "_spawn, _fork or _notebook"
        )

    def _require_class(self, kind: type) -> None:
        made = [each for each in kind.__mro__ if each.__module__.startswith("gossamer.lightning.")]
        if not made:
            return
        name = made[0].__name__
        wanted = name if name in self.classes else ", ".join(self.classes)
        raise ConfigError(
            f"{self.taker}: invalid strategy name, or a class of another package, got {name} of "
            f"{made[0].__module__}; write `from {self.module} import {wanted}`"
        )
