# What the faces of all frameworks would share in Horovod: the workers, process sets, exceptions, elastic states. The
# folder has Horovod's name, because scripts import from it.
"""Of ``horovod.common``: ``basics``, ``process_sets``, ``exceptions``, ``elastic``, ``util``."""
