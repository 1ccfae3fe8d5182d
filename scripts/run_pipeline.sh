#!/usr/bin/env bash
# bash scripts/run_pipeline.sh does what ./paddock pipeline does.
exec "$(dirname "$0")/../paddock" pipeline "$@"
