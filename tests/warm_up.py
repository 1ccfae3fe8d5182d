"""What the server that the tests fork processes from does once, and each of these processes then has."""

import gc
import os

import factories  # noqa: F401
import numpy.ma  # noqa: F401
import torch._dynamo  # noqa: F401

from config import Config
from extensions.card import template
from plan.names import misspelled
from run.extensions import load_extensions

template()
load_extensions(Config(), print)
for name in os.environ:
    misspelled(name)
# What is there now stays: a process that looks for garbage need not look at it, and copy its pages.
gc.collect()
gc.freeze()
