# The name `horovod` for a script under `gossamer run --as-horovod`: worker.py puts the folder above on sys.path, so
# that multiprocessing's spawned children find it too.
"""``horovod``, which is ``gossamer.horovod``."""

from gossamer.stand_in import stand_in

stand_in("horovod", "PyTorch alone: horovod.torch, horovod.torch.elastic, horovod.common and horovod.run")
