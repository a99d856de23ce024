"""Settings that all tests share."""

import os

import outpace  # noqa: F401  before torch: it says how torch's threads wait, to processes that tests start as well

# isort: split
import torch

# Tests run in as many processes as there are cores; threads that wait for a busy core cost minutes.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
