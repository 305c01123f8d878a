"""`launch.py` that gets a real SIGTERM after exactly so many steps: `stopped_launch.py STEP ARGUMENTS...`."""

import sys

from toys import ROOT, stop_after

sys.path.insert(0, str(ROOT))
import launch
from depthgrow_jax.train.signals import StopRequest

if __name__ == "__main__":
    StopRequest.asked = stop_after(int(sys.argv.pop(1)))
    sys.exit(launch.main(sys.argv))
