"""Several ranks train like one. The ranks are real processes with gloo."""

import errno
import os
from socket import gethostname

import pytest
import torch
from commands import WORLD, listening
from factories import TinyRun, a_step, furthest, is_rank, run_ranks, uneven_batches, without_clocks

from common.errors import CheckpointError, SettingsError
from parallel.process import loopback_interface
from parallel.ranks import meet, start_ranks, stop_ranks


def check_collectives() -> None:
    ranks = start_ranks("cpu", 60)
    assert (ranks.world_size, ranks.is_rank0) == (WORLD, ranks.rank == 0)
    places = listening(os.getpid())
    assert len(places) == 1 + ranks.is_rank0 and all(address.is_loopback for address, _ in places), "gloo's, and rank 0's store"
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback_interface() in os.environ["NCCL_SOCKET_IFNAME"]
    assert ranks.all_gather_json([ranks.rank + 1, 0.5]) == [[1, 0.5], [2, 0.5]]
    assert ranks.all_agree(True) and not ranks.all_agree(ranks.rank == 0) and not ranks.all_agree(False)
    for value in (None, {"step": [1, 2.5, "Grüße"]}, ""):
        assert ranks.on_rank0(lambda value=value: value if ranks.is_rank0 else 1 / 0) == value
    assert ranks.all_gather_json("x" * (1 + 5 * ranks.rank)) == ["x", "xxxxxx"]
    assert ranks.raise_on_all(lambda: ranks.rank) == ranks.rank and ranks.gather_or_raise(lambda: ranks.rank) == [*range(WORLD)]

    for bad_ranks, text in ((0, 1), "no such file"), ((1,), f"rank 1 on {gethostname()}: no such file"):
        def fail(bad_ranks=bad_ranks):
            if ranks.rank in bad_ranks:
                failure = CheckpointError("no such file")
                failure.errno = errno.ESTALE
                raise failure

        for agree in (ranks.raise_on_all, ranks.gather_or_raise):
            with pytest.raises(CheckpointError) as raised:
                agree(fail)
            assert str(raised.value) == text and raised.value.on_all_ranks
            assert raised.value.errno == errno.ESTALE, "each rank knows whether to try again"
    stop_ranks()


def fail_to_plan() -> None:
    asked = []

    def decide() -> dict:
        asked.append(True)
        failure = SettingsError("MAX_STEPS: one line", "SEED: another")
        failure.errno = errno.ENOSPC
        raise failure

    with pytest.raises(SettingsError) as raised:
        meet(decide)
    assert str(raised.value) == "MAX_STEPS: one line\nSEED: another" and raised.value.on_all_ranks
    assert raised.value.errno == errno.ENOSPC
    assert len(asked) == is_rank(0), "the others read no settings"
    print("agreed")
    stop_ranks()


def test_all_ranks_raise_the_error_of_rank_0_s_plan(tmp_path):
    assert run_ranks(fail_to_plan, world_size=WORLD, folder=tmp_path).count("agreed") == WORLD


def test_collectives(tmp_path):
    run_ranks(check_collectives, world_size=WORLD, folder=tmp_path)


def check_gradients() -> None:
    """Eight rows with uneven targets give the same gradient on two ranks in micro-batches of 1, 2 or 4."""
    whole, gradients, model = a_step(uneven_batches(8))
    ranks = start_ranks("cpu", 60)
    for rows in (1, 2, 4):
        own = uneven_batches(rows)[ranks.rank * 4 // rows:(ranks.rank + 1) * 4 // rows]
        result, shared, replica = a_step(own, ranks=ranks)
        assert result.loss == pytest.approx(whole.loss, rel=1e-6) and result.updated
        assert result.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
        assert furthest(gradients, shared) < 1e-6, rows
        weights = torch.cat([parameter.detach().flatten() for parameter in replica.parameters()])
        assert len(set(ranks.all_gather_json(weights.numpy().tobytes().hex()))) == 1, "the replicas drift apart"
        torch.testing.assert_close(weights, torch.cat([p.detach().flatten() for p in model.parameters()]), rtol=0, atol=1e-3)
    stop_ranks()


def test_two_ranks_and_any_micro_batches_give_the_gradient_of_one_large_batch(tmp_path):
    run_ranks(check_gradients, world_size=WORLD, folder=tmp_path)


SUMS = ("train_loss", "grad_norm", "val_loss", "val_loss_stderr", "val_perplexity", "val_bits_per_byte")


def without_sums(metrics: list[dict]) -> list[dict]:
    """The metrics that are bit-identical for any number of ranks."""
    return [{name: value for name, value in line.items() if name not in SUMS} for line in without_clocks(metrics)]


def assert_alike(run: TinyRun, other: TinyRun) -> None:
    assert without_sums(run.metrics()) == without_sums(other.metrics())
    for name in SUMS:
        # An error is a difference of nearly equal losses.
        assert run.column(name) == pytest.approx(other.column(name), rel=1e-3 if name.endswith("stderr") else 1e-5), name


def test_one_two_and_three_ranks_learn_and_measure_the_same(tiny_run):
    """Neither the ten items nor the five validation rows divide evenly."""
    runs = {world_size: tiny_run(RUN_NAME=f"ranks-{world_size}", TOTAL_BATCH_SIZE=12 * 32, MAX_STEPS=4, HELLASWAG_EVERY=2)
            for world_size in (1, 2, 3)}
    assert runs[1].train() == 0
    jobs = [runs[world_size].start(world_size) for world_size in (2, 3)]
    for job in jobs:
        codes = job.wait()
        assert set(codes) == {0}, job.text()
    assert len(runs[1].metrics()) == 5 and runs[1].column("hellaswag_n") == {0: 10, 2: 10, 4: 10}
    before_the_first_step = runs[1].lines("evaluations")[:2]
    assert [line["name"] for line in before_the_first_step] == ["validation", "hellaswag"]
    for world_size in (2, 3):
        assert_alike(runs[world_size], runs[1])
        assert runs[world_size].lines("evaluations")[:2] == before_the_first_step
        assert sorted(path.name for path in (runs[world_size].folder / "log").iterdir()) == [
            f"rank-{rank}.txt" for rank in range(world_size)]


@pytest.mark.parametrize(("code", "changes"), [
    (2, {"LERNING_RATE": 1}), (3, {"PRETRAIN_DATA_PATH": "nowhere"}), (5, {"PRETRAIN_CHECKPOINT": "nowhere"}), (5, {"SEED": 3})])
def test_an_error_that_all_ranks_share_is_printed_once(code, changes, whole_on_two_ranks):
    """Also in a resume."""
    text = whole_on_two_ranks.ends([code] * WORLD, **changes)
    assert text.count("error: ") + text.count(" in the settings:") == 1 and "Traceback" not in text, text
