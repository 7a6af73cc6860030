# SPDX-License-Identifier: Apache-2.0
"""One seed for everything that draws random numbers."""

import random

import numpy
import torch


def set_seed(seed: int) -> None:
    """Python's, numpy's and torch's generators; qlorapp draws from torch's."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
