"""On GPUs, no rank hangs in a kernel, and kernels compile."""

import pytest
import torch
from test_launch import planted

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
    assert command.last_line().startswith(f"error: rank {rank}") and "hang" not in command.text()


def test_a_first_small_kernel_compiles():
    assert why_no_kernel("cuda") is None
