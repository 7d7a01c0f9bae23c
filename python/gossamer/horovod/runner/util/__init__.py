"""The helpers of ``horovod.runner.util`` that scripts import: ``threads``."""
