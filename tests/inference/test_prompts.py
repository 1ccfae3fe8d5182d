"""What a model is asked: files of prompts, turns within its context, and why some models cannot chat."""

import json
import shutil

import pytest
from factories import tiny_model_folder

from checkpoint import store
from common.errors import DataError
from extensions.inference.text import Conversation, LanguageModel, Turn, read_prompts
from extensions.inference.weights import open_model

CHAT = [{"role": "user", "content": "Who are you?"}]


def write(path, *lines) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return str(path)


def contents(*arguments) -> list:
    return [prompt.content for prompt in read_prompts(*arguments)]


def test_a_line_of_text_is_a_prompt(tmp_path):
    name = write(tmp_path / "p.txt", "\ufeffOnce upon", "", "  two  ", '{"prompt": "text"}', "")
    assert contents(name) == ["Once upon", "  two  ", '{"prompt": "text"}']
    assert [prompt.line for prompt in read_prompts(name)] == [1, 3, 4]
    (tmp_path / "dos.txt").write_bytes(b"one\r\ntwo\r\n")
    assert contents(str(tmp_path / "dos.txt")) == ["one", "two"]


@pytest.mark.parametrize("line, reason", [
    ("{", "not valid JSON"), ("[1]", 'an object with "prompt" or "messages"'), ("{}", 'with "prompt" or "messages"'),
    ({"prompt": "a", "messages": CHAT}, 'with "prompt" or "messages"'), ({"prompt": 3}, "prompt is a number, expected text"),
    ({"messages": [*CHAT, {"role": "assistant", "content": "Me."}]}, "expected a user's")])
def test_a_wrong_line_is_an_error_with_its_number(tmp_path, line, reason):
    name = write(tmp_path / "p.jsonl", {"prompt": "good"}, "", line)
    with pytest.raises(DataError) as caught:
        read_prompts(name)
    assert str(caught.value).startswith(f"{name}:3: ") and reason in str(caught.value)


def talk(tokenizer, *turns: Turn, context: int = 1000, system: str = "", pretrained_only: bool = False) -> Conversation:
    return Conversation(LanguageModel("m", None, tokenizer, context, pretrained_only), system, list(turns))


def messages(*contents: str, system: str = "") -> list[dict]:
    roles = ("user", "assistant") * len(contents)
    return [{"role": "system", "content": system}] * bool(system) + [
        {"role": role, "content": content} for role, content in zip(roles, contents)]


def test_a_full_context_leaves_out_the_oldest_turns_and_never_the_system_prompt(tokenizer):
    def prompt_of(*contents: str):
        return model.chat_prompt(messages(*contents, system="Be kind."))

    turns = [Turn(f"What is {number}?", f"It is {number}.") for number in range(3)] + [Turn("And now?")]
    model = LanguageModel("m", None, tokenizer, 10_000)
    whole = len(prompt_of(*(text for turn in turns for text in (turn.user_text, turn.answer) if text)).ids)
    for missing, expected in ((0, 0), (1, 1), (len(prompt_of("What is 0?", "It is 0.").ids), 2)):
        conversation = talk(tokenizer, *turns, system="Be kind.", context=whole + 20 - missing)
        prompt = conversation.prompt(20)
        assert conversation.dropped == expected
        kept = [text for turn in turns[expected:] for text in (turn.user_text, turn.answer) if text]
        assert prompt == prompt_of(*kept) and len(prompt.ids) + 20 <= conversation.model.context_length
    assert len(conversation.records()[0]["messages"]) == 7, "what is left out is not forgotten"

    conversation.turns[-1] = Turn("long " * 500)
    with pytest.raises(DataError, match=r"too long: [\d,]+ tokens .* room for \d+"):
        conversation.prompt(20)
    del conversation.turns[1:]
    assert conversation.prompt(20) == prompt_of("What is 0?", "It is 0."), "what was left out comes back"


def test_a_model_that_cannot_chat_gives_the_reason_and_continues_texts(tokenizer, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    tiny_model_folder(folder, tokenizer)
    without = shutil.copytree(folder, tmp_path / "base")
    (without / "chat_template.jinja").unlink()

    def write(place) -> None:
        shutil.copytree(folder, place, dirs_exist_ok=True)
        (place / store.STATE).write_text(json.dumps(
            {"progress": {"step": 1}, "identity": {}, "world_size": 1, "settings": {"TRAINING_STAGE": "pretrain"}}))

    store.publish(tmp_path / "pretrained", write, {"step": 1})
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "chat_template.jinja").write_text("{% for %}")
    for name, why in ((str(without), "its tokenizer has no chat template"), (str(broken), "chat template cannot be read"),
                      (str(tmp_path / "pretrained"), "it was only pretrained, not trained on chats")):
        model = open_model(name)
        assert model.chat_format is None and why in model.no_chat_reason
        with pytest.raises(DataError, match=f"cannot chat: .*{why}"):
            model.chat_prompt(CHAT)
        assert model.text_prompt("Hi").ids
