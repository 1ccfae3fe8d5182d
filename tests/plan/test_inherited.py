"""Settings that nobody gives: from the run to resume, the prepared data, the start, the stage, and the size of the data."""

import json
from pathlib import Path

import pytest

from common.errors import SettingsError
from config import Config
from plan.derived import PRESETS_DIR, settings_of_data, settings_of_length
from plan.make import make_plan, peek

SFT = ["--training-stage", "sft", "--sft-data-path", "set", "--pretrain-checkpoint", "base", "--tokenizer-path", "t"]
DPO = ["--training-stage", "dpo", "--dpo-data-path", "set", "--instruct-checkpoint", "chat", "--tokenizer-path", "t"]


GRPO = ["--training-stage", "grpo", "--grpo-data-path", "set", "--instruct-checkpoint", "chat", "--tokenizer-path", "t"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(*flags):
    return make_plan([*map(str, flags)], {})


def save_state(step: int, **settings) -> None:
    folder = Path(f"runs/first/checkpoints/step-{step:08d}")
    folder.mkdir(parents=True)
    public = Config(**{name.lower(): value for name, value in settings.items()}).public()
    (folder / "trainer_state.json").write_text(json.dumps({"settings": public}))


def test_a_resumed_run_keeps_what_it_recorded_unless_it_is_given():
    recorded = {"TRAINING_STAGE": "sft", "SFT_DATA_PATH": "set", "TOKENIZER_PATH": "t", "PRETRAIN_CHECKPOINT": "base",
                "LEARNING_RATE": 0.25, "MAX_STEPS": 7, "TOTAL_BATCH_SIZE": 8192, "COMPILE": False, "DEVICE": "cuda"}
    save_state(3, **recorded | {"LEARNING_RATE": 0.5})
    save_state(20, **recorded)
    loaded = load("--run-name", "first", "--max-steps", 9)
    config = loaded.config
    assert (config.training_stage, config.learning_rate, config.total_batch_size, config.max_steps) == ("sft", 0.25, 8192, 9)
    assert (config.pretrain_checkpoint, config.compile, config.device, config.epochs) == ("base", False, "auto", None)
    assert not loaded.deferred and {*loaded.sources} == {"run_name", "max_steps"}
    assert any("LEARNING_RATE=0.25" in note and "step-00000020" in note for note in loaded.notes)
    assert config.model_fields_set & {"power_hz", "extensions", "learning_rate"} == {"learning_rate"}, "nobody chose a default"
    by_path = load("--resume", "runs/first/checkpoints/step-00000003").config
    assert (by_path.learning_rate, by_path.pretrain_checkpoint) == (0.5, None), "it starts from that step"
    assert load(*SFT, "--run-name", "first", "--resume", "never").config.learning_rate == 2e-5
    assert load(*DPO, "--run-name", "first").config.learning_rate == 1e-6, "another stage is another run"


def test_a_resumed_run_keeps_the_preset_of_its_start(monkeypatch):
    """MUON_MOMENTUM is newer than the run, so its default is what the run had. SAVE_EVERY does not change the curve."""
    preset = Path("presets/mine.env").resolve()
    monkeypatch.setattr("plan.derived.PRESETS_DIR", preset.parent)
    monkeypatch.setattr("plan.layers.PRESETS_DIR", preset.parent)
    preset.parent.mkdir()
    preset.write_text("LEARNING_RATE=0.01\nMUON_MOMENTUM=0.8\nSAVE_EVERY=5\nTOKENIZER_PATH=t\nPRETRAIN_DATA_PATH=d\n")
    save_state(3, PRESET="mine", LEARNING_RATE=0.02, SAVE_EVERY=7, TOKENIZER_PATH="t",
               PRETRAIN_DATA_PATH="d")
    state = Path("runs/first/checkpoints/step-00000003/trainer_state.json")
    state.write_text(state.read_text().replace("MUON_MOMENTUM", "GONE"))
    loaded = load("--preset", "mine", "--run-name", "first")
    assert (loaded.config.learning_rate, loaded.config.muon_momentum, loaded.config.save_every) == (0.02, 0.95, 5)
    assert any("mine.env" in note and note.endswith("LEARNING_RATE=0.01, MUON_MOMENTUM=0.8") for note in loaded.notes)
    assert load("--preset", "mine", "--run-name", "first", "--learning-rate", 0.03).config.learning_rate == 0.03
    for flags in (["--preset", "mine", "--run-name", "other"], ["--preset", "mine,mine", "--run-name", "first"]):
        assert load(*flags).config.muon_momentum == 0.8
    preset.write_text("MICRO_BATCH_SIZE=0\nTOTAL_BATCH_SIZE=8192\nMAX_SEQ_LEN=1024\nTOKENIZER_PATH=t\nPRETRAIN_DATA_PATH=d\n")
    for step, rows, is_ignored in ((4, 8, False), (5, 4, True)):
        save_state(step, PRESET="mine", MICRO_BATCH_SIZE=rows, TOTAL_BATCH_SIZE=8192, TOKENIZER_PATH="t", PRETRAIN_DATA_PATH="d")
        loaded = load("--preset", "mine", "--run-name", "first")
        assert (loaded.config.micro_batch_size, any("Ignored" in note for note in loaded.notes)) == (rows, is_ignored)


SFT_RECORD = {"TRAINING_STAGE": "sft", "SFT_DATA_PATH": "set", "TOKENIZER_PATH": "t", "PRETRAIN_CHECKPOINT": "base", "LEARNING_RATE": 0.25,
              "TOTAL_BATCH_SIZE": 8192, "MICRO_BATCH_SIZE": 4, "MAX_STEPS": 7, "DIM": 64, "N_HEADS": 4}
OTHER_ENVS = {  # name -> (.env, flags, what of it is ignored, what still applies)
    "another stage": ("TRAINING_STAGE=dpo\nDPO_DATA_PATH=pairs\nINSTRUCT_CHECKPOINT=chat\nTOKENIZER_PATH=u\nLEARNING_RATE=1e-6\nEPOCHS=2\n"
                      "SEED=7\nMICRO_BATCH_SIZE=6\nRANDOM_INIT=true\nTEACHER_MODEL=x\nLOG_EVERY=3\nDEVICE=cpu", (),
                      "TRAINING_STAGE=dpo, INSTRUCT_CHECKPOINT=chat, TOKENIZER_PATH=u, LEARNING_RATE=1e-6, EPOCHS=2, SEED=7, "
                      "MICRO_BATCH_SIZE=6, RANDOM_INIT=true, TEACHER_MODEL=x", {"log_every": 3, "device": "cpu"}),
    "the default stage": ("PRETRAIN_DATA_PATH=corpus.txt\nDEPTH=4\nN_HEADS=8", (), "DEPTH=4, N_HEADS=8", {"pretrain_data_path": "corpus.txt"}),
    "a preset of another stage": ("PRESET=sample", (), "TRAINING_STAGE=pretrain", {"hellaswag_name": "sample items"}),
    "the same stage": ("SFT_DATA_PATH=other\nDIM=128\nMAX_STEPS=50\nMICRO_BATCH_SIZE=2", (), "SFT_DATA_PATH=other, DIM=128",
                       {"max_steps": 50, "micro_batch_size": 2}),
    "flags beat it too": ("EPOCHS=3\nSEED=7", ("--max-steps", 50, "--training-stage", "sft"), "EPOCHS=3, SEED=7", {"max_steps": 50}),
    "another conflict": ("MIN_LEARNING_RATE=0.5\nWEIGHT_DECAY=0.2", (), "MIN_LEARNING_RATE=0.5", {"weight_decay": 0.2}),
    "what is allowed": ("ALLOW_RESUME_MISMATCH=SEED\nSEED=7\nDATA_SEED=8", (), "DATA_SEED=8", {"seed": 7}),
}


@pytest.mark.parametrize("name", OTHER_ENVS)
def test_a_record_beats_an_env_of_another_run_and_one_line_lists_what_is_ignored(name):
    env, flags, ignored, applies = OTHER_ENVS[name]
    for place in ("set", "t", "base"):
        Path(place).touch()
    save_state(3, **SFT_RECORD)
    Path(".env").write_text(env)
    loaded, values = load("--run-name", "first", *flags), peek(["--run-name", "first", *map(str, flags)])[0]
    kept = {name.lower(): value for name, value in SFT_RECORD.items() if name not in ("DIM", "N_HEADS")} | {"seed": 1337} | applies
    assert {name: getattr(loaded.config, name) for name in kept} == kept
    assert (values["training_stage"], values["sft_data_path"]) == ("sft", "set"), "what ./paddock train prepares"
    lines = [note for note in loaded.notes if "Ignored" in note]
    assert len(lines) == 1 and ignored in lines[0] and lines[0].startswith(("Ignored from .env, ", f"Ignored from {PRESETS_DIR}"))
    inputs = load("--run-name", "first", *flags, "--seed", 9)
    assert inputs.config.seed == 9 and "seed" in inputs.sources, "which is compared with the record"
    by_environment = make_plan(["--run-name", "first", *map(str, flags)], {"SEED": "9"})
    assert by_environment.config.seed == 9 and by_environment.sources["seed"] == "environment"


def test_an_env_for_another_stage_than_that_of_a_flag_does_not_break_a_new_run():
    """As in a command that `prepare` prints."""
    Path(".env").write_text("TRAINING_STAGE=sft\nGENERATION_EVAL_EVERY=5\nEPOCHS=2\nLOG_EVERY=3")
    loaded = load("--training-stage", "pretrain", "--pretrain-data-path", "d", "--tokenizer-path", "t", "--max-steps", 5)
    assert (loaded.config.generation_eval_every, loaded.config.epochs, loaded.config.log_every) == (0, None, 3)
    assert any(note.endswith("GENERATION_EVAL_EVERY=5, EPOCHS=2") for note in loaded.notes)
    with pytest.raises(SettingsError, match="GENERATION_EVAL_EVERY"):
        load("--training-stage", "pretrain", "--pretrain-data-path", "d", "--tokenizer-path", "t", "--generation-eval-every", 5)


@pytest.mark.parametrize("resume, stage", [("runs/other", "sft"), ("runs/other", "dpo"), ("never", "dpo")])
def test_a_run_that_a_flag_names_is_resumed_whatever_checkpoint_env_names(resume, stage):
    for place in ("set", "t", "base"):
        Path(place).touch()
    save_state(3, **SFT_RECORD)
    Path(".env").write_text(f"TRAINING_STAGE={stage}\nRESUME={resume}\n")
    loaded = load("--run-name", "first")
    assert (loaded.config.resume, loaded.config.training_stage, loaded.config.learning_rate) == ("auto", "sft", 0.25)
    assert any("Ignored" in note and f"RESUME={resume}" in note for note in loaded.notes)
    Path(".env").write_text(f"TRAINING_STAGE={stage}\nRESUME={resume}\nRUN_NAME=first\nDPO_DATA_PATH=p\nSFT_DATA_PATH=set\n"
                            "TOKENIZER_PATH=t\nPRETRAIN_CHECKPOINT=base")
    assert load().config.resume == resume, "it names both"
    Path(".env").write_text("RESUME=never\nSFT_DATA_PATH=set\nTOKENIZER_PATH=t\nPRETRAIN_CHECKPOINT=base")
    assert load("--run-name", "first", "--training-stage", "sft").config.resume == "never"


@pytest.mark.parametrize("state", ["", "{", "[]", "{}", '{"settings": 1}', '{"settings": {"LEARNING_RATE": "x", "MAX_STEPS": -1}}'])
def test_a_damaged_state_gives_nothing(state):
    save_state(3)
    Path("runs/first/checkpoints/step-00000003/trainer_state.json").write_text(state)
    config = load(*SFT, "--run-name", "first").config
    assert config.max_steps == 1000 and config.learning_rate in (2e-5, 6e-4)


@pytest.mark.parametrize("flags, rate, epochs", [
    (SFT, 2e-5, 3), ([*SFT, "--lora-enabled"], 2e-4, 3), (DPO, 1e-6, 1), ([*DPO, "--lora-enabled"], 1e-5, 1),
    ([*SFT, "--max-steps", 9, "--learning-rate", 0.5], 0.5, None), ([*SFT, "--num-train-epochs", 2], 2e-5, 2)])
def test_the_stage_decides_what_is_not_given(flags, rate, epochs):
    loaded = load(*flags)
    assert (loaded.config.learning_rate, loaded.config.epochs) == (rate, epochs)
    assert {"total_batch_size", "warmup_steps", "compile"} <= {*loaded.deferred}
    assert ("max_steps" in loaded.deferred) == (epochs is not None)


@pytest.mark.parametrize("stage, rows, ranks, batch_rows", [
    ("sft", 20, 1, 1), ("sft", 200, 1, 4), ("sft", 200, 8, 8), ("sft", 29_000, 1, 64), ("sft", 29_000, 6, 66), ("dpo", 10_000, 4, 64),
    ("pretrain", 263, 1, 8), ("pretrain", 1_000_000, 1, 512)])
def test_the_batch_suits_the_data_and_the_ranks(stage, rows, ranks, batch_rows):
    before = Config(training_stage=stage, world_size=ranks, epochs=3.0)
    names = ("total_batch_size", "micro_batch_size", "max_steps", "warmup_steps")
    config = before.model_copy(update=settings_of_data(before, rows, names))
    assert config.rows_per_step == batch_rows and config.rows_per_step % (config.micro_batch_size * ranks) == 0
    assert config.max_steps == -(-3 * rows // batch_rows) and config.warmup_steps == min(100, config.max_steps // 10)


def test_each_stage_starts_from_its_own_checkpoint():
    named = {"PRETRAIN_CHECKPOINT": "base", "INSTRUCT_CHECKPOINT": "chat", "DPO_CHECKPOINT": "preferred"}
    found = {stage: make_plan([*flags, "--training-stage", stage], named).config.named_checkpoint
             for stage, flags in (("pretrain", ["--pretrain-data-path", "set", "--tokenizer-path", "t"]), ("sft", SFT), ("dpo", DPO))}
    assert found == {"pretrain": "base", "sft": "base", "dpo": "chat"}


def test_the_tokenizer_is_that_of_the_data_or_of_the_start():
    Path("data/one").mkdir(parents=True)
    Path("data/mix").mkdir()
    assert load("--check", "--world-size", 2, "--pretrain-data-path", "data/one").config.tokenizer_path is None
    Path("of-the-data").touch()
    Path("data/one/manifest.json").write_text(json.dumps({"tokenizer": "of-the-data"}))
    Path("data/mix/mixture.json").write_text(json.dumps({"sources": [{"label": "a", "set": "../one"}]}))
    for path in ("data/one", "data/mix"):
        assert load("--pretrain-data-path", path).config.tokenizer_path == "of-the-data"
    for name in ("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-1.7B", "gpt2"):  # of the hub
        Path("data/one/manifest.json").write_text(json.dumps({"tokenizer": name}))
        assert load("--pretrain-data-path", "data/one").config.tokenizer_path == name
    for name in ("gone/bpe.model", "gone/tokenizer.json", "data/gone", "gone/tokenizers/chat"):  # of files that were moved
        Path("data/one/manifest.json").write_text(json.dumps({"tokenizer": name}))
        assert load("--check", "--world-size", 2, "--pretrain-data-path", "data/one").config.tokenizer_path is None
    Path("runs/base/checkpoints/step-00000002").mkdir(parents=True)
    Path("runs/base/checkpoints/step-00000002/tokenizer.json").write_text("{}")
    start = ["--training-stage", "sft", "--sft-data-path", "raw", "--pretrain-checkpoint"]
    assert load(*start, "base").config.tokenizer_path == "runs/base/checkpoints/step-00000002"
    assert load(*start, "owner/model@main").config.tokenizer_path == "owner/model"
    assert load(*start, "base", "--tokenizer-path", "given").config.tokenizer_path == "given"


def test_recorded_settings_are_recorded_again_without_a_change():
    """Not as a setting would be read: 600 is not 600.0."""
    save_state(3, PRETRAIN_DATA_PATH="set", TOKENIZER_PATH="t", RUN_NAME="first", LORA_ALPHA=8)
    file = Path("runs/first/checkpoints/step-00000003/trainer_state.json")
    for timeout in (600, 600.0):
        recorded = json.loads(file.read_text())["settings"] | {"DISTRIBUTED_TIMEOUT": timeout}
        file.write_text(json.dumps({"settings": recorded}))
        assert json.dumps(load("--run-name", "first").config.public()) == json.dumps(recorded)


PRETRAIN = ["--pretrain-data-path", "set", "--tokenizer-path", "t"]
EVERY = ("validate_every", "sample_every", "save_every", "log_every")


def every(config: Config) -> tuple[int, ...]:
    return tuple(getattr(config, name) for name in EVERY)


def test_a_run_has_enough_validations_samples_saves_and_lines():
    """Each is also due at the end."""
    for steps in (*range(12, 100), 299, 300, 301):
        chosen = settings_of_length(steps, EVERY)
        validations, samples, saves, lines = (-(-steps // chosen[name]) for name in EVERY)
        assert 6 <= validations <= 15 and 2 <= samples == saves <= 3 and 6 <= lines <= 31, steps
        assert steps < 200 or (validations, samples) == (15, 3)


def test_what_is_given_takes_precedence_over_the_length_of_the_run():
    loaded = load(*PRETRAIN, "--max-steps", 300, "--validate-every", 0, "--log-every", 7)
    assert every(loaded.config) == (0, 100, 100, 7)
    assert "MAX_STEPS=300 sets SAVE_EVERY=100, SAMPLE_EVERY=100" in loaded.notes
    assert every(load(*PRETRAIN, "--max-steps", 0).config) == (1, 1, 1, 1), "0 would mean never"
    long = load(*PRETRAIN, "--max-steps", 100_000)
    assert every(long.config) == every(Config()) and not long.notes
    for name in ("sample", "sample,sample-sft", "sample,sample-dpo", "sample,sample-lora"):
        config = load("--preset", name, "--pretrain-checkpoint", "x").config
        assert 10 <= config.max_steps / config.validate_every <= 20 and config.save_every == 0


@pytest.mark.parametrize("saved, flags, expected", [
    ((20, 100, 100, 10), [], (20, 100, 100, 10)), ((20, 100, 100, 10), ["--max-steps", 3000], (200, 500, 500, 10)),
    ((25, 100, 0, 1), ["--max-steps", 3000], (25, 500, 0, 1)),  # given
    ((250, 500, 500, 10), ["--max-steps", 3000], (250, 500, 500, 10)),  # of a version with fixed defaults
    ((20, 100, 100, 10), ["--validate-every", 7], (7, 100, 100, 10))])
def test_the_intervals_of_a_resumed_run_change_only_with_its_steps(saved, flags, expected):
    save_state(3, PRETRAIN_DATA_PATH="set", TOKENIZER_PATH="t", MAX_STEPS=300, **dict(zip(map(str.upper, EVERY), saved)))
    assert every(load("--run-name", "first", *flags).config) == expected


@pytest.mark.parametrize("trained, flags, length", [
    (256, SFT, 256), (256, DPO, 256), (2048, SFT, 1024), (256, [*SFT, "--max-seq-len", 512], 512), (256, [*SFT, "--depth", 16], 256),
    (2048, [*SFT, "--depth", 16], 2048), ("256", SFT, 1024), (256, ["--pretrain-checkpoint", "base", *SFT[4:], "--run-name", "first"], 1024)])
@pytest.mark.parametrize("file, name", [("trainer_state", "MAX_SEQ_LEN"), ("config", "max_position_embeddings")])
def test_rows_are_not_longer_than_those_that_the_start_was_trained_on(file, name, trained, flags, length):
    save_state(3, TRAINING_STAGE="sft", SFT_DATA_PATH="set", PRETRAIN_CHECKPOINT="base")  # of another run, which keeps its rows
    for start in ("base", "chat"):
        folder = Path(f"runs/{start}/checkpoints/step-00000002")
        folder.mkdir(parents=True)
        (folder / f"{file}.json").write_text(json.dumps({name: trained, "settings": {name: trained}}))
    loaded = load(*flags)
    assert loaded.config.max_seq_len == length and any("MAX_SEQ_LEN=256" in note for note in loaded.notes) == (length == 256)


@pytest.mark.parametrize("group", [2, 6, 16])
@pytest.mark.parametrize("rows", [40, 1000, 100_000])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_data_gives_grpo_micro_batches_of_whole_groups(group, rows, ranks):
    """An epoch reads each prompt once; a prompt is `group` training rows."""
    loaded = load(*GRPO, "--grpo-group", group, "--max-seq-len", 64)
    before = loaded.config.model_copy(update={"world_size": ranks})
    config = before.model_copy(update=settings_of_data(before, rows, {*loaded.deferred}))
    assert (config.training_stage, config.epochs) == ("grpo", 1) and config.micro_batch_size % group == 0
    assert config.rows_per_step % (config.micro_batch_size * ranks) == 0
    assert rows <= config.max_steps * config.rows_read < rows + config.rows_read
