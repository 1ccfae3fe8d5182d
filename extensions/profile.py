"""Speed, phases, utilization and power of the steps, and profiles of single ones."""

from observe.profile import Measurements

EXTENSION = Measurements
