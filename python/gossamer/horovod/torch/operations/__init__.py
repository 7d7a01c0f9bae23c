"""The collectives of the Horovod face, from a script's call to the native core.

A call meets these files in order: ``collectives`` (waits; gradients by ``gradients``), ``asynchronous`` (translates and
checks), ``submission`` (names the operation and calls the native core), ``handles`` (waits for it).
"""
