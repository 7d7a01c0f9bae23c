"""``python -m gossamer.bagua.distributed.launch``: Bagua's flags and torchrun's."""

import sys

from gossamer.launch.bagua import main

if __name__ == "__main__":
    sys.exit(main("launch"))
