"""On GPUs, no rank hangs in a kernel, DETERMINISTIC=true gives the same bits each time, and kernels compile."""

import pytest
import torch
from factories import assert_same_run
from test_launch import busy, planted, told_seconds

from model_utils import why_no_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")]
CUDA = {"DEVICE": "cuda", "PRECISION": "auto"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nccl puts no two ranks on one GPU")
@pytest.mark.parametrize("what", ["exception", "SIGKILL"])
@pytest.mark.parametrize(("moment", "rank"), [("step", 0), ("step", 1), ("HellaSwag", 1), ("write", 0)])
def test_when_one_rank_fails_the_other_does_not_stay_in_a_kernel(what, moment, rank, tiny_run):
    run = tiny_run(**CUDA)
    with planted(run, what, moment, rank) as command:
        assert command.wait() == 1, command.text()
    assert told_seconds(run) < 10 * busy()
    assert command.last_line().startswith(f"error: rank {rank}") and "hang" not in command.text()


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_deterministic_runs_are_alike_bit_for_bit(compiled, tiny_run):
    runs = [tiny_run(**CUDA, DETERMINISTIC="true", COMPILE=compiled, RUN_NAME=name) for name in ("one", "other")]
    for run in runs:
        job = run.start()
        assert job.wait(300) == [0] and "; deterministic" in job.text(), job.text()
    assert_same_run(*runs, 6, logs=())


def test_a_first_small_kernel_compiles():
    assert why_no_kernel("cuda") is None
