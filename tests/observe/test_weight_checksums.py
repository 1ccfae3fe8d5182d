"""LEDGER_CHECKSUM: any change of a weight changes the ledger's checksum, however the weights are divided over ranks."""

import pytest
import torch
from factories import TINY, UNMEASURED, argv_of, new_model, run_ranks
from hypothesis import given
from hypothesis import strategies as st

from config import Config, ModelConfig
from extensions import checksums as extension
from model_utils import build_model, load_weights
from parallel.ranks import start_ranks, stop_ranks
from plan.make import make_plan
from tokenizer import load_tokenizer

SHAPE = {name.lower(): value for name, value in TINY.items() if name.lower() in ModelConfig.model_fields}


def checksums(model) -> list[int]:
    return extension.joined(extension.weight_checksums(model).tolist())


@pytest.fixture(scope="module")
def model():
    return new_model(ModelConfig(**SHAPE), 200)


@given(st.data())
def test_any_bit_changes_its_tensor_and_the_total(model, data):
    before, names = checksums(model), sorted(name for name, _ in model.named_parameters())
    name = data.draw(st.sampled_from(names))
    bits = model.get_parameter(name).detach().view(torch.int32).view(-1)
    place, bit = data.draw(st.integers(0, len(bits) - 1)), data.draw(st.integers(0, 31))
    flip = torch.tensor(1 << bit).to(torch.int32)
    bits[place] ^= flip
    after = checksums(model)
    bits[place] ^= flip
    assert [name for name, one, other in zip(names, before, after) if one != other] == [name]
    assert extension.total_checksum(before) != extension.total_checksum(after)
    assert checksums(model) == before


SWAPS = {"two values of a row": lambda w: (w[3, [2, 1]], (3, [1, 2])), "two values of a column": lambda w: (w[[2, 1], 3], ([1, 2], 3)),
         "two rows": lambda w: (w[[2, 1]], [1, 2]), "two columns": lambda w: (w[:, [2, 1]], (slice(None), [1, 2])),
         "rows with columns": lambda w: (w.T.clone(), ...)}


@pytest.mark.parametrize("kind", SWAPS)
def test_swapped_values_change_the_checksum(kind, model):
    weight = model.layers[0].attention.wq.weight.data
    before, kept = checksums(model), weight.clone()
    values, places = SWAPS[kind](kept)
    weight[places] = values
    assert not torch.equal(weight, kept) and checksums(model) != before
    weight.copy_(kept)


def print_checksums(settings: dict) -> int:
    ranks = start_ranks("cpu", 60)
    model = build_model(make_plan(argv_of(settings)).config, 200, ranks, torch.float32)
    print(f"rank {ranks.rank}:", checksums(model))
    stop_ranks()
    return 0


@pytest.mark.parametrize("world_size, sharding", [
    (2, {"SHARDING": "full"}),
    pytest.param(4, {"SHARDING": "hybrid", "SHARD_DEGREE": 2}, marks=pytest.mark.slow)])
def test_shards_add_up_to_the_checksum_of_the_whole(world_size, sharding, prepared, tmp_path):
    settings = prepared.settings() | {"OUTPUT_DIR": tmp_path, "TOTAL_BATCH_SIZE": 32 * 24, "WORLD_SIZE": world_size, **sharding}
    config = Config(**{name.lower(): value for name, value in TINY.items()})
    expected = checksums(new_model(config, 200, seed=config.seed))
    text = run_ranks(print_checksums, settings, world_size=world_size, folder=tmp_path)
    assert [line for line in text.splitlines() if line.startswith("rank")] == [f"rank {rank}: {expected}"
                                                                               for rank in range(world_size)]


def assert_ledger_knows(run, step: int) -> None:
    """The ledger's checksums of a step are those of the checkpoint's weights."""
    config = Config(**{name.lower(): str(value) for name, value in run.settings.items()})
    model = new_model(config, load_tokenizer(str(run.settings["TOKENIZER_PATH"]), "auto").vocab_size)
    load_weights(run.checkpoint(step), model)
    found = checksums(model)
    line = run.lines("ledger")[step - 1]
    assert line["weights"] == f"{extension.total_checksum(found):016x}"
    assert line["tensors"] == "".join(f"{checksum >> 32:08x}" for checksum in found)


def test_the_ledger_has_the_checksums_of_the_checkpoint(tiny_run):
    run = tiny_run(**UNMEASURED, TIE_EMBEDDINGS="false", MAX_STEPS=4, LEDGER_CHECKSUM="true")
    assert run.train(MAX_STEPS=2, LR_SCHEDULE="constant") == run.train(LR_SCHEDULE="constant") == 0
    for step in (2, 4):
        assert_ledger_knows(run, step)
    assert len({line["weights"] for line in run.lines("ledger")}) == 4
