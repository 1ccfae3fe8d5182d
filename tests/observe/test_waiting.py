"""OpenMP's threads beside programs that begin after the start."""

import os
import subprocess
import sys

import pytest
from commands import ROOT

from parallel.process import WAITING

PROGRAM = """
import os, time
import torch
from extensions import waiting

class Statistics:  # the main thread waits as long as it runs while the machine is busy
    looks, is_busy, ran, waited = 0, False, 0, 0

    def exists(self):
        return True

    def read_text(self):
        self.looks, self.ran, self.waited = self.looks + 1, self.ran + 1000, self.waited + 1000 * self.is_busy
        return f"{self.ran} {self.waited} 1"

def number():
    return len(os.listdir("/proc/self/task"))

def number_after_looks():
    until = waiting.STATISTICS.looks + 3
    while waiting.STATISTICS.looks < until:
        time.sleep(0.01)
    time.sleep(0.3)  # threads begin and end
    return number()

waiting.PERIOD, waiting.STATISTICS = 0.05, Statistics()
torch.zeros(torch.get_num_threads() * waiting.GRAIN).exp_()
numbers = [number()]
waiting.watch()
if number() > numbers[0]:
    for waiting.STATISTICS.is_busy in (False, True, False, True):
        numbers.append(number_after_looks())
print(*numbers)
"""


def thread_numbers(threads: int, **environment: str) -> list[int]:
    kept = {name: value for name, value in os.environ.items() if name not in WAITING}
    environment = {**kept, "OMP_NUM_THREADS": str(threads), **environment}
    printed = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return [*map(int, printed.stdout.split())]


@pytest.mark.skipif(not os.path.exists("/proc/self/task") or os.cpu_count() < 2, reason="not Linux, or one core, which torch uses with one thread")
def test_sleeping_threads_exceed_the_cores_while_the_machine_is_busy():
    """Then GNU's OpenMP turns 100 times. Each group of sleeping threads has one that Python began, which it does not count."""
    threads = 2
    own, idle, busy, again_idle, again_busy = thread_numbers(threads)
    assert idle == again_idle == own + 1 and busy == again_busy, "one thread looks"
    groups = (busy - idle) // threads
    assert (busy - idle) % threads == 0 and threads + groups * (threads - 1) > len(os.sched_getaffinity(0))


@pytest.mark.parametrize("threads, environment", [(1, {}), (2, {"GOMP_SPINCOUNT": "5"}), (2, {"OMP_WAIT_POLICY": "ACTIVE"})])
def test_one_thread_and_what_the_user_chose_stay(threads, environment):
    assert len(thread_numbers(threads, **environment)) == 1
