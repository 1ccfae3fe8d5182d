import re
from pathlib import Path

import pytest

from common.errors import SettingsError
from config import Config
from plan.derived import settings_of_data
from plan.make import make_plan

DATA = {"PRETRAIN_DATA_PATH": "shards", "TOKENIZER_PATH": "tokenizer.model"}
DEPTHS = range(1, 65)
USUAL_WORLDS = (1, 2, 3, 4, 6, 8, 12, 16)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(*flags, **environ):
    return make_plan(flags, DATA | environ)


def sized(depth: int, *flags, **environ) -> Config:
    return load("--depth", str(depth), *flags, **environ).config


@pytest.mark.parametrize("world", USUAL_WORLDS)
def test_every_depth_is_valid_on_all_usual_numbers_of_ranks_which_read_the_same_rows(world):
    for depth in DEPTHS:
        alone, config = sized(depth), sized(depth, "--check", "--world-size", str(world))
        assert config.accumulation_steps * config.micro_batch_size * world == config.rows_per_step
        safe = {"micro_batch_size": alone.micro_batch_size, "world_size": 1}
        assert config.model_copy(update=safe) == alone


def test_the_shape_has_the_proportions_of_llama_3():
    for depth in DEPTHS:
        config = sized(depth)
        assert (config.n_layers, config.dim, config.head_dim) == (depth, 64 * depth, 64)
        assert config.n_heads % config.n_kv_heads == 0 and config.n_heads <= 4 * config.n_kv_heads
        assert config.hidden_dim % 64 == 0 and 0 <= config.hidden_dim - 8 / 3 * config.dim < 64
    assert [sized(depth).n_kv_heads for depth in (1, 2, 4, 6, 7, 12, 16, 32)] == [1, 1, 1, 2, 7, 3, 4, 8]


def test_what_is_set_anywhere_else_wins_and_the_rest_fits_it():
    Path(".env").write_text("DEPTH=4\nMAX_SEQ_LEN=100\nMULTIPLE_OF=32\n")
    Path("run.json").write_text('{"max_steps": 500}')
    loaded = load("--config", "run.json", "--learning-rate", "0.5", INIT_STD="0.1")
    config = loaded.config
    assert (config.dim, config.max_seq_len, config.init_std, config.learning_rate) == (256, 100, 0.1, 0.5)
    assert (config.max_steps, config.warmup_steps, config.ffn_dim) == (500, 50, 704)
    assert config.total_batch_size % 4800 == 0
    assert loaded.sources["dim"] == "DEPTH=4" and loaded.sources["max_seq_len"] == ".env:2"
    assert loaded.notes[0] == (
        "DEPTH=4 sets N_LAYERS=4, DIM=256, N_HEADS=4, FFN_DIM=704, N_KV_HEADS=1, TOTAL_BATCH_SIZE=14400, MICRO_BATCH_SIZE=144, "
        "WARMUP_STEPS=50")
    assert sized(4, "--dim", "512").n_heads == 8
    reference = load("--preset", "1.3b").config
    assert {name: getattr(sized(4, "--preset", "1.3b"), name) for name in ("dim", "hidden_dim", "learning_rate")} == {
        name: getattr(reference, name) for name in ("dim", "hidden_dim", "learning_rate")}


def reproducible(world: int, **settings) -> dict:
    config = Config(reproducible=True, world_size=world, **settings)
    return settings_of_data(config, 5000, {"total_batch_size", "micro_batch_size", "max_steps", "warmup_steps"})


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_reproducible_run_has_the_same_batch_on_any_number_of_ranks(world):
    flags = "--reproducible=true", "--check", f"--world-size={world}"
    for depth in DEPTHS:
        assert sized(depth, *flags).micro_batch_size == sized(depth, *flags[:1]).micro_batch_size
    config = load("--total-batch-size=16384", "--max-seq-len=1024", "--micro-batch-size=0", *flags).config  # 16 rows
    assert (config.micro_batch_size, config.reproducible_micro_batches) == (4, 4)
    assert reproducible(world, training_stage="sft", epochs=3.0) == reproducible(1, training_stage="sft", epochs=3.0)


@pytest.mark.parametrize("flags, words", [
    (["--world-size=3", "--sharding=full"], "MICRO_BATCH_SIZE * MAX_SEQ_LEN * WORLD_SIZE = 1 * 1024 * 3"),
    (["--world-size=32"], "16 micro-batches, too few for WORLD_SIZE=32; use at most 16 ranks"),
    (["--gradient-dtype=bf16"], "GRADIENT_DTYPE=bf16"), (["--precision=fp16"], "PRECISION=fp16"),
    (["--sharding=full", "--cpu-offload=true"], "CPU_OFFLOAD=true")])
def test_what_reproducible_does_not_cover_is_refused(flags, words):
    batch = ["--check", "--reproducible=true", "--total-batch-size=16384", "--max-seq-len=1024", "--micro-batch-size=1"]
    assert load(*batch, "--world-size=3").config.accumulation_steps == 6  # 16 on 3 ranks
    with pytest.raises(SettingsError, match=re.escape(words)) as caught:
        load(*batch, *flags)
    assert len(str(caught.value).splitlines()) == 1
