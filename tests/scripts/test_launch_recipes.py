"""The recipes of scripts/cluster start the launcher as it wants to be started, and go on after a preemption only.

The job of Slurm runs with an `srun` and a `scontrol` of ours, which do what Slurm's do: `srun` starts a task for each node,
forwards USR1 to the tasks themselves, kills them at TERM, and exits with their highest code.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from commands import ROOT
from factories import PATIENCE, wait_until

from common import errors
from parallel.process import EXIT_PREEMPTED
from plan.make import make_plan
from scripts import launch as launcher

RECIPES = ROOT / "scripts" / "cluster"
FATAL = {errors.DataError, errors.NonFiniteError, errors.CheckpointError}
DATA = {"PRETRAIN_DATA_PATH": "set", "TOKENIZER_PATH": "tokenizer.model"}
SRUN = """#!/usr/bin/env python3
import os, signal, subprocess, sys
option = dict(word.split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
os.environ["JOB_PID"] = str(os.getppid())
assert (option["--kill-on-bad-exit"], option["--open-mode"]) == ("0", "append"), "one may be saving; logs of earlier starts stay"
tasks = []
def kill(*_):
    for task in tasks:
        task.kill()
signal.signal(signal.SIGUSR1, lambda number, _: [task.send_signal(number) for task in tasks])
signal.signal(signal.SIGTERM, kill)
for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
    output = option["--output"].replace("%j", os.environ["SLURM_JOB_ID"]).replace("%n", str(node))
    tasks.append(subprocess.Popen(sys.argv[sys.argv.index("bash"):], env={**os.environ, "SLURM_NODEID": str(node)},
                                  stdout=open(output, "a"), stderr=subprocess.STDOUT))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then echo 127.0.0.1; echo elsewhere; else echo "$@" >> scontrol.txt; fi
"""


def checked(monkeypatch, command: list[str], **settings: str) -> tuple[int, int, str, int]:
    """Where the machines meet, of a command that starts the launcher; its settings, and others, are checked too."""
    assert command[:2] == ["python", "scripts/launch.py"]
    monkeypatch.setattr(sys, "argv", command[1:])
    args, flags = launcher.parse_args()
    assert args.max_restarts == 3
    make_plan(flags, {"WORLD_SIZE": "16", "RANK": "0", **settings})
    return args.nnodes, args.node_rank, args.master_addr, args.master_port


class Job:
    """The job in a folder of its own; `python` is what a node runs, a command of bash."""

    def __init__(self, folder: Path, python: str, **environ: str):
        self.folder, self.output, binaries = folder, folder / "job.txt", folder / "bin"
        binaries.mkdir()
        (folder / "scripts").symlink_to(ROOT / "scripts")
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": f"#!/usr/bin/env bash\n{python}\n"}.items():
            (binaries / name).write_text(text)
            (binaries / name).chmod(0o755)
        inherited = {name: value for name, value in os.environ.items() if name not in ("RUN_NAME", "MASTER_ADDR", "MASTER_PORT")}
        path = os.pathsep.join([str(binaries), str(Path(sys.executable).parent), os.environ["PATH"]])
        with open(self.output, "a") as output:
            self.process = subprocess.Popen(
                # INT is ignored where pytest runs in the background, and bash cannot trap what is.
                ["env", "--default-signal=INT", "bash", str(RECIPES / "slurm.sh")], cwd=folder, stderr=subprocess.STDOUT, stdout=output,
                start_new_session=True, env={**inherited, "PATH": path, "VIRTUAL_ENV": "set", "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "first",
                                             "SLURM_JOB_NODELIST": "nodes", "SLURM_JOB_NUM_NODES": "2", **environ})

    def text(self) -> str:
        return "\n".join(path.read_text() for path in (self.output, *sorted(self.folder.glob("slurm-*.out"))))

    def wait(self) -> int:
        """Wait until it has ended; returns the exit code."""
        try:
            return self.process.wait(2 * PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def requeued(self) -> bool:
        file = self.folder / "scontrol.txt"
        return file.exists() and file.read_text() == "requeue 17\n"


WAITS = ("trap 'echo node $NODE_RANK saves; sleep 0.3; exit 143' USR1; trap 'sleep 0.1; exit 143' TERM; "
         "echo node $NODE_RANK; for i in {1..6000}; do sleep 0.05; done")


@pytest.mark.parametrize(("python", "environ", "code", "requeued"), [
    ("exit 143", {}, 143, True), ("exit 0", {}, 0, False), ("exit $((NODE_RANK * 6))", {}, 6, False),
    ("exit 143", {"SLURM_RESTART_COUNT": "100"}, 143, False)])
def test_a_job_is_queued_again_after_a_preemption_only(python, environ, code, requeued, tmp_path):
    job = Job(tmp_path, python=python, **environ)
    assert job.wait() == code and job.requeued() is requeued, job.text()


@pytest.mark.parametrize(("signals", "requeued"), [
    ([signal.SIGUSR1, signal.SIGUSR1], True), ([signal.SIGINT, signal.SIGUSR1], False)])
def test_a_signal_to_the_job_saves_once_on_every_node(signals, requeued, tmp_path):
    job = Job(tmp_path, python=WAITS)
    wait_until(lambda: "node 0" in job.text() and "node 1" in job.text(), job.text)
    for number in signals:
        job.process.send_signal(number)
        time.sleep(0.1)
    assert job.wait() == EXIT_PREEMPTED, job.text()
    assert [job.text().count(f"node {node} saves") for node in range(2)] == [1, 1] and job.requeued() is requeued, job.text()


def test_skypilot_starts_a_launcher_on_each_machine_and_goes_on_after_a_preemption(monkeypatch, tmp_path):
    recipe = yaml.safe_load((RECIPES / "skypilot.yaml").read_text(encoding="utf-8"))
    assert recipe["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_PREEMPTED]
    assert recipe["envs"]["RUN_NAME"] and recipe["envs"]["OUTPUT_DIR"] in recipe["file_mounts"]
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "setup.sh").write_text("set_up() { test -f $1; }\npython() { printf '%s\\0' python \"$@\" > command; }\n")
    (tmp_path / "requirements.txt").touch()
    environ = {**recipe["envs"], "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
               "PATH": os.environ["PATH"]}
    for part in ("setup", "run"):
        subprocess.run(["bash", "-c", recipe[part]], cwd=tmp_path, env=environ, check=True)
    command = (tmp_path / "command").read_text().split("\0")[:-1]
    assert checked(monkeypatch, command) == (2, 1, "10.0.0.1", 29500)


def test_kubernetes_starts_a_launcher_on_each_node_and_fails_only_for_what_would_fail_again(monkeypatch):
    volume, runtime, job = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    jobs = runtime["spec"]["template"]["spec"]
    node, = jobs["replicatedJobs"]
    pod, rules = node["template"]["spec"]["template"]["spec"], node["template"]["spec"]["podFailurePolicy"]["rules"]
    container, = pod["containers"]
    assert node["name"] == container["name"] == "node", "the names that the trainer looks for"

    # Which codes end all for good. The pattern is searched in the job's message, as Kubernetes writes it.
    values = {code for rule in rules for code in rule["onExitCodes"]["values"]}
    pattern, = jobs["failurePolicy"]["rules"][0]["onJobFailureMessagePatterns"]
    restarting = {code for code in values
                  if re.search(pattern, f"Container node for pod a/b failed with exit code {code} matching FailJob rule at index 0")}
    assert restarting == {EXIT_PREEMPTED} and values - restarting == {each.exit_code for each in FATAL}
    assert node["template"]["spec"]["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"

    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first-node-0-0.first", "PET_MASTER_PORT": "29400"}
    command = [re.sub(r"\$\((\w+)\)", lambda found: pet[found[1]], word) for word in container["command"]]
    assert checked(monkeypatch, command + job["spec"]["trainer"]["args"], **DATA) == (2, 1, "first-node-0-0.first", 29400)
    claim, = {each.get("persistentVolumeClaim", {}).get("claimName") for each in pod["volumes"]} - {None}
    assert claim == volume["metadata"]["name"]
