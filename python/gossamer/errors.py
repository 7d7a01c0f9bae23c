# The exceptions of Gossamer. Each is also the built-in a caller would expect, so that code which
# knows nothing of Gossamer can catch it. Raised by every layer; nothing here knows any of them.
"""Exceptions that Gossamer raises."""


class GossamerError(Exception):
    """Base of all. Raised as such where an algorithm's own code raised another exception, which is its cause."""


class ConfigError(GossamerError, ValueError):
    """An argument, environment variable or call order that cannot work, found before anything is sent.

    Also raised on every rank when the ranks disagree on what must be equal (model, bucket plan, algorithm).
    """


class CodecError(GossamerError, ValueError):
    """A codec was given a dtype, shape, block or wire buffer that it cannot encode or decode."""


class CommError(GossamerError, RuntimeError):
    """A transfer or rendezvous failed: a timeout, a lost peer, a collective that the backend refused.

    The message names rank, step and bucket where they are known; the cause is chained (``__cause__``).
    """


class UsageError(ConfigError, RuntimeError):
    """What torch's DistributedDataParallel reports as a RuntimeError, such as parameters that a backward left out."""
