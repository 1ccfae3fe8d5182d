"""Files whose content is not what their name says are named for what they are, with a remedy that works."""

import re
import shutil
import subprocess

import pytest

from checkpoint import model_json, store
from checkpoint.tensors import open_tensors
from common.errors import PaddockError
from common.files import plain, read_text
from data_pipeline.mixture import read_mix
from data_pipeline.shards import TokenizerInfo, open_token_set, read_manifest
from extensions.inference.text import read_prompts
from hellaswag_utils import read_items
from plan.layers import read_config_file, read_env_file
from tokenizer import load_tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"


def problems(read):
    def call(path):
        if found := read(path).problems:
            raise PaddockError(*found)

    return call


# How files are read, and a name for each.
READERS = {
    "any.bin": lambda path: open(path, "rb", opener=plain), "settings.env": problems(read_env_file), "run.json": problems(read_config_file),
    "config.json": model_json.read_model_json, "tokenizer.json": lambda path: load_tokenizer(str(path)),
    "tokenizer.model": lambda path: load_tokenizer(str(path)), "items.jsonl": read_items, "mix.json": read_mix,
    "manifest.json": lambda path: read_manifest(path.parent), "prompts.txt": lambda path: read_prompts(str(path), chat=False),
    "trainer_state.json": lambda path: store.read_state(path.parent)}


@pytest.mark.parametrize("name", [*READERS, "model.safetensors", "train_000.bin"])
def test_a_git_lfs_pointer_is_an_error_that_advises_git_lfs_pull(name, tmp_path):
    folder = tmp_path / "a clone"
    folder.mkdir()
    (folder / name).write_bytes(POINTER)
    read = READERS.get(name, open_tensors)
    if name == "train_000.bin":
        read = lambda path: open_token_set(path, "train", TokenizerInfo(5))  # noqa: E731
    with pytest.raises((PaddockError, OSError)) as raised:
        read(folder / name)
    text = str(raised.value)
    assert "it is a git-lfs pointer" in text and f"run git lfs pull in {folder}" in text
    assert "permissions" not in text, "what does not help is not advised"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", [name for name in READERS if name != "any.bin"])
def test_text_in_utf_16_is_an_error_whose_command_makes_it_utf_8(name, encoding, tmp_path):
    folder = tmp_path / "it's here"
    folder.mkdir()
    path, content = folder / name, 'MAX_STEPS=3  # "é" is no ASCII\r\nSEED=1\r\n'
    path.write_bytes(content.encode(encoding))
    with pytest.raises(PaddockError) as raised:
        READERS[name](path)
    assert re.search(r"it is UTF-\d\d(LE|BE)? text; save it as UTF-8, or convert it", str(raised.value))
    assert "permissions" not in str(raised.value)
    if shutil.which("iconv") and name == "settings.env":
        subprocess.run(str(raised.value).partition("convert it with: ")[2], shell=True, check=True)
        assert read_text(path, "utf-8-sig") == content.replace("\r\n", "\n")
        assert read_env_file(path).values == {"max_steps": ("3", f"{path}:1"), "seed": ("1", f"{path}:2")}
