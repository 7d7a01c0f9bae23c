# Each worker of horovod.run() runs this file. It loads the function that was sent, calls it, and leaves its result or
# exception in the folder where the launcher looks. function.py sends and collects; nothing imports this.
"""Worker side of ``horovod.run``: ``python -m gossamer.launch.call FOLDER``."""

import importlib
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigError


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    sent = pickle.loads((folder / "call").read_bytes())
    sys.path += [entry for entry in sent["path"] if entry not in sys.path]
    pickler = importlib.import_module(sent["pickler"])  # found where the path says
    function, args, kwargs = pickle.loads(sent["call"])
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        _leave(folder / f"error{rank}", _portable(error, pickler))
        raise
    try:
        _leave(folder / f"result{rank}", pickler.dumps(result))
    except Exception as error:
        raise ConfigError(
            f"horovod.run: the result of rank {rank} must be one that {pickler.__name__} takes, "
            f"got a {type(result).__name__}: {error}"
        ) from error


def _portable(error: Exception, pickler: Any) -> bytes:
    """The exception, or its text alone where it cannot be pickled, and its traceback."""
    below_main = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, below_main))
    try:
        pickled = pickler.dumps(error)
        pickle.loads(pickled)  # an __init__ of its own may not take what pickle gives it
    except Exception:
        return pickle.dumps((None, text))
    return pickle.dumps((pickled, text))


def _leave(path: Path, content: bytes) -> None:
    part = path.with_name(f"part-{path.name}")
    part.write_bytes(content)
    part.replace(path)


if __name__ == "__main__":
    main()
