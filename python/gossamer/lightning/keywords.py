"""Keyword arguments that a strategy hands on to another class: refused where that class has none of that name."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def require_keywords(
    strategy: type, taker: Callable[..., Any], given: Mapping[str, Any], *, taken: int = 0
) -> None:
    """TypeError with the nearest argument, if the taker does not have one of the given names.

    Args:
        strategy: the class whose constructor was given them. Its own arguments may be the nearest too.
        taker: a class or function.
        taken: how many of the taker's first arguments the strategy gives it itself.
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
