"""Models of the hub: found in a cache that is made here as huggingface_hub makes it; nothing is downloaded."""

import shutil
from pathlib import Path

import pytest
from factories import cached_on_the_hub

from checkpoint import store
from checkpoint.huggingface import hub_model, name_of_download
from common.errors import CheckpointError


@pytest.fixture
def cached(tmp_path, monkeypatch) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("")
    return cached_on_the_hub(model, "acme/tiny-1", tmp_path / "cache", monkeypatch)


def test_a_model_is_found_by_its_name_and_by_a_revision(cached, tmp_path):
    for name in ("acme/tiny-1", f"acme/tiny-1@{cached.name}", "acme/tiny-1@main"):
        assert store.locate(name, tmp_path / "run") == cached
    assert name_of_download(cached) == f"acme/tiny-1@{cached.name}"
    assert name_of_download(tmp_path) is None
    shutil.copytree(cached, tmp_path / "acme" / "tiny-1")
    assert store.locate("acme/tiny-1", tmp_path / "run") == tmp_path / "acme" / "tiny-1", "what is here comes first"


@pytest.mark.parametrize("name", ["acme/tiny-2", "acme/tiny-1@v2"])
def test_a_name_that_the_hub_does_not_give_is_refused_with_the_reason(name, cached, tmp_path):
    with pytest.raises(CheckpointError, match=f"{name} is not a local folder, and the request to the hub failed.*offline.*HF_TOKEN"):
        store.locate(name, tmp_path / "run")


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "../x/y", "x y/z"])
def test_what_cannot_be_a_model_of_an_owner_is_not_asked_for(name, cached, tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        store.locate(name, tmp_path / "run")


def test_an_incomplete_model_is_asked_for_again(cached):
    (cached / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="offline"):
        hub_model("acme/tiny-1")
