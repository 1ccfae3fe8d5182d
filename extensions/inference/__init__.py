"""Text from a model: sampling, batches of requests, streams of text; the flags of commands that generate."""

import argparse
from math import inf

from common.command_line import number

TEMPERATURE = number(float, "from 0 on", lambda value: 0 <= value < inf)
SEED = number(int, "from 0 to 4,294,967,295", lambda value: 0 <= value < 2**32)


def add_loading_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of `weights.load_to_generate`."""
    parser.add_argument("--base", metavar="MODEL", help="the adapters' base model (default: as in training)")
    parser.add_argument("--weights", choices=("fp32", "bf16", "int8"),
                        help="precision of weights and computation; int8 = weights of the blocks in 8 bits, "
                             "on a CPU (default: as in training, bf16 where it is fast and else fp32)")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add sampling flags, named as in `engine.Sampling`."""
    parser.add_argument("--temperature", type=TEMPERATURE, default=0.8, metavar="T",
                        help="0 = always the most likely token (default: %(default)s)")
    parser.add_argument("--top-p", type=number(float, "above 0 and at most 1", lambda value: 0 < value <= 1),
                        default=0.95, metavar="P",
                        help="sample from the most likely tokens of this probability (default: %(default)s)")
    parser.add_argument("--top-k", type=number(int, "from 0 on", lambda value: value >= 0), default=0,
                        metavar="K", help="sample from at most this many tokens; 0 = all (default)")
    parser.add_argument("--min-p", type=number(float, "from 0 to 1", lambda value: 0 <= value <= 1),
                        default=0.0, metavar="P",
                        help="sample from tokens of at least P times the highest probability (default: 0)")
    parser.add_argument("--repetition-penalty", type=number(float, "above 0", lambda value: 0 < value < inf),
                        default=1.0, metavar="R",
                        help="values above 1 make repeated tokens less likely (default: 1)")
