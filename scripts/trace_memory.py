"""Deprecated alias of: python train.py --check memory"""
import os
import sys

TRAIN = f"{os.path.dirname(__file__)}/../train.py"
os.execv(sys.executable, [sys.executable, TRAIN, "--check=memory", *sys.argv[1:]])
