"""Distributed training: process group, collectives, sharding, watchdog, and how a process ends."""
