"""What the server that the tests fork processes from does once, and each of these processes then has."""

import factories  # noqa: F401
import torch._dynamo  # noqa: F401

from extensions.card import template

template()
