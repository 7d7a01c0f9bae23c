# The name `bagua` for a script under `gossamer run --as-bagua`: worker.py puts the folder above on sys.path, so that
# multiprocessing's spawned children find it too. Bagua's import gave torch's classes its methods; so does this one.
"""``bagua``, which is ``gossamer.bagua``."""

from gossamer import bagua
from gossamer.stand_in import stand_in

bagua.patch()
stand_in("bagua", "bagua.torch_api and bagua.distributed")
