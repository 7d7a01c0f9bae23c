# A folder of Horovod's launcher that scripts and its test helpers import from. No part of training.
"""Of ``horovod.runner.util``: ``threads``."""
