"""Checks the keyword arguments that a strategy passes to another class."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def require_keywords(
    strategy: type, taker: Callable[..., Any], given: Mapping[str, Any], *, taken: int = 0
) -> None:
    """Raise TypeError, with the name that comes nearest, if the taker lacks one of the given arguments.

    Args:
        strategy: the class whose constructor got the arguments. The nearest name may be one of its own arguments.
        taker: the class or function that they are passed to.
        given: the arguments.
        taken: the number of the taker's first arguments that the strategy passes itself.
    """
    everything = list(inspect.signature(taker).parameters)
    reserved, known = everything[:taken], everything[taken:]
    for name, value in given.items():
        if name in known:
            continue
        near = difflib.get_close_matches(name, [*known, *inspect.signature(strategy).parameters], 1)
        if name in reserved:
            advice = "the strategy gives that one itself; leave it out"
        else:
            advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
        raise TypeError(
            f"{strategy.__name__}: other arguments must be those of {taker.__name__}, got {name}={value!r}; {advice}"
        )
