"""Settings that all unit tests share."""

import os

import torch

# Models of a few dozen dimensions gain nothing from threads, and threads that wait for a busy core cost minutes.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
