"""What a model can be asked, and why it cannot."""

import json
import shutil
from pathlib import Path

import pytest
from factories import tiny_model_folder

from checkpoint import store
from common.errors import DataError
from extensions.inference.weights import open_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("folder"), tokenizer)


MESSAGES = [{"role": "user", "content": "Hi"}]


def changed(folder: Path, copy: Path, template: str) -> str:
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text(template)
    return str(copy)


def test_a_model_that_cannot_chat_gives_the_reason_and_continues_texts(folder, tmp_path):
    without = shutil.copytree(folder, tmp_path / "base")
    (without / "chat_template.jinja").unlink()

    def write(place: Path) -> None:
        shutil.copytree(folder, place, dirs_exist_ok=True)
        (place / store.STATE).write_text(json.dumps(
            {"progress": {"step": 1}, "identity": {}, "world_size": 1, "settings": {"TRAINING_STAGE": "pretrain"}}))

    store.publish(tmp_path / "pretrained", write, {"step": 1})
    broken = changed(folder, tmp_path / "broken", "{% for %}")
    for name, why in ((str(without), "its tokenizer has no chat template"), (broken, "chat template cannot be read"),
                      (str(tmp_path / "pretrained"), "it was only pretrained, not trained on chats")):
        model = open_model(name)
        assert model.chat_format is None and why in model.no_chat_reason
        with pytest.raises(DataError, match=f"cannot chat: .*{why}"):
            model.chat_prompt(MESSAGES)
        assert model.text_prompt("Hi").ids
