"""Run by test_elastic_hosts.py as a worker: the loop of benchmarks/elastic_loop.py, whose driver is lost after 3 s."""

import sys

from gossamer import membership
from tests import ROOT

if __name__ == "__main__":
    membership.SILENT_S = 3
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import elastic_loop

    elastic_loop.main()
