#!/usr/bin/env bash
# Simulate two nodes on one machine: two network namespaces connected by a veth
# pair, a launcher in each, gloo. Trains a tiny model with torchrun and with
# scripts/launch.py; both must match a single process.
#
#   sudo bash tests/system/faults/two_nodes.sh
#   sudo PROCESSES_PER_NODE=2 bash tests/system/faults/two_nodes.sh
#
# Needs root and iproute2, takes a minute, and cleans up after itself.
set -euo pipefail
cd "$(dirname "$0")/../../.."
[ "$(id -u)" = 0 ] || { echo "error: network namespaces need root; run this with sudo" >&2; exit 1; }
command -v ip > /dev/null || { echo "error: there is no ip command; install iproute2" >&2; exit 1; }
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then PATH="$PWD/.venv/bin:$PATH"; fi
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD:$PWD/tests"

processes=${PROCESSES_PER_NODE:-1}
work=$(mktemp -d)
nodes=("paddock0-$$" "paddock1-$$")
links=("pad0-$$" "pad1-$$")
addresses=(10.213.77.1 10.213.77.2)
started=()

clean_up() {
    # A launcher ends its ranks too.
    for process in "${started[@]}"; do kill "$process" 2> /dev/null || true; done
    wait
    for node in "${nodes[@]}"; do ip netns delete "$node" 2> /dev/null || true; done
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

for i in 0 1; do ip netns add "${nodes[i]}"; done
ip link add "${links[0]}" netns "${nodes[0]}" type veth peer name "${links[1]}" netns "${nodes[1]}"
for i in 0 1; do
    ip -n "${nodes[i]}" address add "${addresses[i]}/24" dev "${links[i]}"
    ip -n "${nodes[i]}" link set "${links[i]}" up
    ip -n "${nodes[i]}" link set lo up
done

python - "$work" > "$work/flags" 2> /dev/null <<'END'
import sys
from pathlib import Path
from factories import TinyRun, prepare
work = Path(sys.argv[1])
run = TinyRun(prepare(work / "data"), work / "runs")
print("\n".join(flag for flag in run.argv() if not flag.startswith("--run-name")))
END
mapfile -t flags < "$work/flags"

echo "One process ..."
python train.py "${flags[@]}" --run-name alone > "$work/alone.txt" 2>&1 || { cat "$work/alone.txt"; exit 1; }

for kind in torchrun launch; do
    echo "Two nodes of $processes, by $kind ..."
    started=()
    if [ $kind = torchrun ]; then launcher=(-m torch.distributed.run) script=(train.py); else launcher=(scripts/launch.py) script=(); fi
    for i in 0 1; do
        # In a namespace the host's name has none of its addresses: the ranks find the interface by the master's.
        timeout --kill-after 60 300 ip netns exec "${nodes[i]}" \
            python "${launcher[@]}" --nnodes 2 --nproc-per-node "$processes" --node-rank $i --master-addr "${addresses[0]}" \
            --master-port 29500 "${script[@]}" "${flags[@]}" --run-name $kind > "$work/$kind-$i.txt" 2>&1 &
        started+=($!)
    done
    for i in 0 1; do
        wait "${started[i]}" || { echo "error: node $i failed:" >&2; cat "$work/$kind-$i.txt" >&2; exit 1; }
    done
    started=()
done

python - "$work/runs" "$((2 * processes))" <<'END'
import json
import math
import sys
from pathlib import Path
runs, world_size = Path(sys.argv[1]), int(sys.argv[2])
alone, *others = ([json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
                  for name in ("alone", "torchrun", "launch"))
for name, lines in zip(("torchrun", "launch"), others):
    manifest = json.loads(max((runs / name / "checkpoints").glob("step-*/MANIFEST.json")).read_text())
    assert manifest["world_size"] == world_size, manifest["world_size"]
    assert [line["step"] for line in lines] == [line["step"] for line in alone]
    for line, expected in zip(lines, alone):
        for key in ("train_loss", "grad_norm", "val_loss", "hellaswag_acc", "hellaswag_acc_norm", "hellaswag_n"):
            assert math.isclose(line.get(key, 0), expected.get(key, 0), rel_tol=1e-5), (name, line["step"], key)
    print(f"{name}: {world_size} ranks on 2 nodes, {len(lines) - 1} steps, validation loss {lines[-1]['val_loss']:.6f}; "
          f"one process: {alone[-1]['val_loss']:.6f}")
END
