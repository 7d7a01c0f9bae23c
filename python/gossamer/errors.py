"""The exceptions that Gossamer raises. Each is also a built-in exception, so that other code can catch it."""


class GossamerError(Exception):
    """The base of all. Raised itself when a user's algorithm raises another exception, which is the cause."""


class ConfigError(GossamerError, ValueError):
    """An argument, an environment variable or the order of calls is wrong. Raised before anything is sent.

    Every rank raises it when the ranks differ in what must be equal, such as the model or the algorithm.
    """


class CodecError(GossamerError, ValueError):
    """A codec was given a dtype, shape, block or wire buffer that it cannot encode or decode."""


class CommError(GossamerError, RuntimeError):
    """A transfer or a rendezvous failed: it timed out, a peer was lost, or the backend refused a collective.

    The message names rank, step and bucket if they are known. The cause is chained (`__cause__`).
    """


class UsageError(ConfigError, RuntimeError):
    """An error that torch's DistributedDataParallel raises as RuntimeError, such as unused parameters."""
