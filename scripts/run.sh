#!/usr/bin/env bash
# bash scripts/run.sh does what ./paddock train does.
exec "$(dirname "$0")/../paddock" train "$@"
