"""A pickle that runs code when it is loaded, in place of every file that is read: it is refused or ignored, and never run."""

import hashlib
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from checkpoint import store

# For each mode: the settings whose files are replaced, and the files without which it cannot run.
READ = {"lora-sft": (("PRETRAIN_CHECKPOINT", "SFT_DATA_PATH", "TOKENIZER_PATH", "HELLASWAG_PATH", "OUTPUT_DIR"),
                     "model.safetensors adapter_model.safetensors optimizer.safetensors trainer_state.json manifest.json "
                     "MANIFEST.json train-00000.bin train-segments-00000.bin adapter_config.json paddock_adapter.json "
                     "items.jsonl"),
        "dpo-stored": (("DPO_DATA_PATH",), "manifest.json train-00000.bin train-segments-00000.bin"),
        "distilled": (("TEACHER_MODEL",), "model.safetensors config.json MANIFEST.json")}


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def bomb(tmp_path) -> Path:
    """The folder that exists only if a pickle was executed."""
    return tmp_path / "exploded"


def bombs(bomb: Path) -> list[bytes]:
    """The same bomb in the formats of pickle and of torch.save."""
    zipped = io.BytesIO()
    torch.save({"weight": Bomb(bomb)}, zipped)
    return [pickle.dumps(Bomb(bomb)), zipped.getvalue()]


def test_they_do_go_off(bomb):
    plain, zipped = bombs(bomb)
    for unpickle in (lambda: pickle.loads(plain), lambda: torch.load(io.BytesIO(zipped), weights_only=False)):
        unpickle()
        assert bomb.is_dir()
        bomb.rmdir()


def seal(folder: Path, name: str) -> None:
    """Put the right hash into the manifest, as an attacker would."""
    if name == store.MANIFEST or not (folder / store.MANIFEST).exists():
        return
    content = (folder / name).read_bytes()
    manifest = json.loads((folder / store.MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / store.MANIFEST).write_bytes(store.manifest_bytes(manifest))


@pytest.mark.parametrize("mode", READ)
def test_no_file_that_a_run_reads_is_unpickled(mode, stages, tmp_path, bomb, capsys):
    """The run is finished, so each start reads all files and takes no step."""
    whole, place = tmp_path / "whole", tmp_path / "place"
    place.mkdir()
    names, needed = READ[mode]
    settings, copies = stages.settings(mode) | {"OUTPUT_DIR": place / "runs"}, {}
    for name in {*names} - {"OUTPUT_DIR"}:
        copies[name] = place / name / Path(settings[name]).name
        copies[name].parent.mkdir()
        (shutil.copytree if Path(settings[name]).is_dir() else shutil.copy)(settings[name], copies[name])
    run = stages.run(mode, place / "runs", **copies, MAX_STEPS=1)
    assert run.train() == 0 and run.train() == 0
    shutil.copytree(place, whole)
    folders = [place / ("runs" if name == "OUTPUT_DIR" else name) for name in names]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file() and path.parent.name != "log"]
    refused = set()
    for file in files:
        for content in bombs(bomb)[:2 if file.suffix in (".safetensors", ".bin") else 1]:
            shutil.rmtree(place)
            shutil.copytree(whole, place)
            file.write_bytes(content)
            seal(file.parent, file.name)
            code = run.train()
            assert code in (0, 2, 3, 5) and not bomb.exists() and "Traceback" not in capsys.readouterr().err, file
            if code or file.read_bytes() != content:  # caches are computed again
                refused.add(file.name)
    assert refused >= {*needed.split()}
    if mode == "dpo-stored":
        assert any(name.startswith("reference-") for name in refused)


def test_a_teacher_that_transformers_loads_is_not_unpickled(stages, tmp_path, bomb, capsys):
    """A teacher of another architecture, with weights as a pickle only."""
    import transformers

    teacher = shutil.copytree(stages.teacher, tmp_path / "teacher")
    for name in ("model.safetensors", store.MANIFEST, "config.json"):
        (teacher / name).unlink()
    transformers.GPTNeoXConfig(vocab_size=512, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                               architectures=["GPTNeoXForCausalLM"]).save_pretrained(teacher)
    run = stages.run("distilled", tmp_path / "runs", TEACHER_MODEL=teacher)
    for content in bombs(bomb):
        (teacher / "pytorch_model.bin").write_bytes(content)
        assert run.train() == 5
        assert str(teacher) in capsys.readouterr().err and not bomb.exists()
