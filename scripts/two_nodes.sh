#!/usr/bin/env bash
# Simulate two nodes on one machine (as root): sudo bash scripts/two_nodes.sh
# PROCESSES_PER_NODE=2 in the environment starts two ranks on each node.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
exec bash tests/system/faults/two_nodes.sh
