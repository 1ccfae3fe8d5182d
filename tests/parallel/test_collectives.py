"""What ranks say to each other, and with how many messages."""

import errno
from socket import gethostname

import pytest
import torch.distributed as dist
from factories import is_rank, joined_ranks, run_ranks

from common.errors import CheckpointError, DataError, SettingsError
from parallel.ranks import meet, stop_ranks

WORLD = 3


def fail(ranks, failing: set[int]):
    def make() -> int:
        if ranks.rank in failing:
            raise DataError(f"line {ranks.rank}")
        return ranks.rank

    return make


def fail_to_write(ranks):
    try:
        raise OSError(errno.ESTALE, "Stale file handle")
    except OSError as error:
        failure = CheckpointError("errno 5, code: 28")
        failure.errno = error.errno
        raise failure from error


def talk() -> None:
    waited_for, calls = [], []
    wait, all_reduce = dist.Store.wait, dist.all_reduce
    dist.Store.wait = lambda store, keys, *limit: (waited_for.append(len(keys)), wait(store, keys, *limit))[1]
    dist.all_reduce = lambda tensor, *options: (calls.append(tensor.numel()), all_reduce(tensor, *options))[1]
    with joined_ranks("cpu", 60) as ranks:
        assert waited_for[0] == (WORLD if ranks.is_rank0 else 1) and {*waited_for[1:]} <= {1}, "only rank 0 looks for each rank"

        values = [None, {"what": "aé\u2028" * 100}, [1.5]]
        assert ranks.all_gather_json(values[ranks.rank]) == values
        assert ranks.all_gather_json([ranks.rank, 2.0**53 - 1]) == [[rank, 2.0**53 - 1] for rank in range(WORLD)]

        calls.clear()
        assert ranks.raise_on_all(fail(ranks, set())) == ranks.rank and calls == [1], "a word, when all is well"
        for failing, message in (({0, 2}, "line 0"), ({1, 2}, f"rank 1 on {gethostname()}: line 1"), ({2}, f"rank 2 on {gethostname()}: line 2")):
            with pytest.raises(DataError) as raised:
                ranks.raise_on_all(fail(ranks, failing))
            assert str(raised.value) == message and raised.value.on_all_ranks
        with pytest.raises(CheckpointError) as raised:
            ranks.raise_on_all(lambda: fail_to_write(ranks) if ranks.rank == 1 else None)
        assert raised.value.errno == errno.ESTALE, "each rank knows whether to try again"
        print("agreed")


def fail_to_plan() -> None:
    asked = []

    def decide() -> dict:
        asked.append(True)
        failure = SettingsError("MAX_STEPS: one line", "SEED: another")
        failure.errno = errno.ENOSPC
        raise failure

    with pytest.raises(SettingsError) as raised:
        meet(decide)
    assert str(raised.value) == "MAX_STEPS: one line\nSEED: another" and raised.value.on_all_ranks and raised.value.errno == errno.ENOSPC
    assert len(asked) == is_rank(0), "the others read no settings"
    print("agreed")
    stop_ranks()


def test_all_ranks_raise_the_error_of_rank_0_s_plan(tmp_path):
    assert run_ranks(fail_to_plan, world_size=WORLD, folder=tmp_path).count("agreed") == WORLD


def test_ranks_look_for_each_other_gather_and_fail_together(tmp_path):
    assert run_ranks(talk, world_size=WORLD, folder=tmp_path).count("agreed") == WORLD
