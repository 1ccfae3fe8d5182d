"""What a model is asked, and pieces of what it answers: together they are the whole text, whatever the tokenizer, the tokens and the stop strings."""

import json
import shutil
from pathlib import Path

import pytest
from factories import prepare, tiny_model_folder
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from checkpoint import store
from common.errors import DataError
from extensions.inference.text import WINDOW, Conversation, LanguageModel, TextStream, Turn, read_prompts
from extensions.inference.weights import open_model
from tokenizer import HuggingFaceTokenizer, load_tokenizer

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


KINDS = ("tiktoken", "byte-level", "llama 2", "metaspace", "gemma", "wordpiece", "no decoder")
AB = ("b", "ab", "ba", "aba", "babb")
TEXT = "The cat saw 猫 and 👩‍👩‍👧, then naïve ДОМ\n\n\tfed it.  Twice! "


def sentencepiece_like(folder: Path, kind: str) -> HuggingFaceTokenizer:
    """A tokenizer.json with few words, and a token for each byte that has none."""
    words = ["▁the", "▁cat", "▁", "a", "t", "é", "s", "\n", "�", "##s", ".", "▁▁", *AB]
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    vocab = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, *words])}
    model = models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(models.WordPiece(vocab, unk_token="<unk>") if kind == "wordpiece" else model)
    if kind in ("llama 2", "gemma"):
        spaces = [normalizers.Prepend("▁")] * (kind == "llama 2") + [normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(spaces)
        strip = [decoders.Strip(" ", 1, 0)] * (kind == "llama 2")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    elif kind == "metaspace":
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace(prepend_scheme="first")
    elif kind == "wordpiece":
        made.decoder = decoders.WordPiece()
    made.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {kind: sentencepiece_like(folder / kind, kind) for kind in KINDS[2:]}
    made["tiktoken"] = load_tokenizer(str(prepare(folder / "prepared").tokenizer))
    (folder / "byte-level").mkdir()
    made["tiktoken"].save_huggingface(folder / "byte-level")
    made["byte-level"] = load_tokenizer(str(folder / "byte-level"))
    return made


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    return [*map(stream.add, ids), stream.finish()]


def cut(text: str, stop: list[str]) -> str:
    """The text before the stop string that is complete first, read one character after the other."""
    for end in range(len(text) + 1):
        if here := [word for word in stop if text[:end].endswith(word)]:
            return text[:end - max(map(len, here))]
    return text


ids_and_stop = st.tuples(
    st.lists(st.floats(0, 1, exclude_max=True) | st.floats(0.95, 1, exclude_max=True), max_size=6 * WINDOW),
    st.lists(st.text("abt .�é", min_size=1, max_size=3), max_size=3))


@pytest.mark.parametrize("kind", KINDS)
@given(ids_and_stop)
def test_any_tokens_give_the_text_of_all_tokens_up_to_the_stop_string(tokenizers, kind, drawn):
    tokenizer, (places, stop) = tokenizers[kind], drawn
    ids = [int(place * tokenizer.vocab_size) for place in places]
    stream = TextStream(tokenizer, stop)
    text, whole = "".join(pieces(stream, ids)), tokenizer.decode(ids)
    assert text == cut(whole, stop)
    assert stream.stopped == any(word in whole for word in stop)


def test_text_that_cannot_change_is_streamed_at_once(tokenizers):
    """Whole characters come with their last token; only what may begin a stop string, or become one, waits."""
    for kind in ("tiktoken", "byte-level"):
        stream, ids = TextStream(tokenizers[kind]), tokenizers[kind].encode(TEXT)
        assert "".join(tokenizers[kind].decode([token]) for token in ids) != TEXT, "no character over several tokens"
        for count, token in enumerate(ids, 1):
            whole, start = tokenizers[kind].decode(ids[:count]), tokenizers[kind].decode(ids[:count - 1])
            assert stream.add(token) == whole.removesuffix("\ufffd")[len(start.removesuffix("\ufffd")):]
    stream = TextStream(tokenizers["tiktoken"], ["User:", "Us"])
    messages = [stream.add(token) for character in "a U-User: b" for token in tokenizers["tiktoken"].encode(character)]
    assert messages == ["a", " ", "", "U-", "", "", "", "", "", "", ""] and stream.stopped and stream.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
@given(st.text("a 猫é", max_size=2 * WINDOW), st.text("a 猫é", max_size=2 * WINDOW))
@example("猫猫猫", "猫")
def test_a_continuation_has_the_space_that_the_first_word_of_a_text_lacks(tokenizers, kind, before, after):
    tokenizer = tokenizers[kind]
    before, after = tokenizer.encode(before), tokenizer.encode(after)
    text = "".join(pieces(TextStream(tokenizer, prefix=before), after))
    assert tokenizer.decode(before) + text == tokenizer.decode(before + after)
