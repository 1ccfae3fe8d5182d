"""Deprecated alias of: python train.py --check scaling"""
import os
import sys

TRAIN = f"{os.path.dirname(__file__)}/../train.py"
os.execv(sys.executable, [sys.executable, TRAIN, "--check=scaling", *sys.argv[1:]])
