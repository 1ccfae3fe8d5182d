"""Turns: what the model is given of them, within its context, and what is kept of them for training."""


import pytest

from common.errors import DataError
from extensions.inference.text import Conversation, LanguageModel, Turn


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


def test_a_text_is_continued_by_both_until_the_model_ends_it(tokenizer):
    turns = Turn("The cat", " saw "), Turn("the dog", ". It"), Turn("fed it", ""), Turn("\n", "twice.", is_complete=True), Turn("A fox")
    conversation = talk(tokenizer, *turns[:4], pretrained_only=True)
    conversation.turns.append(Turn(""))
    first = "The cat saw the dog. It fed it\ntwice."
    assert conversation.records() == [{"text": first}]
    conversation = talk(tokenizer, *turns, pretrained_only=True)
    assert conversation.prompt(10) == conversation.model.text_prompt("A fox")
    assert conversation.records() == [{"text": first}, {"text": "A fox"}]
    # Of a text that is too long the end is kept, behind the document's start.
    ids = conversation.model.text_prompt("A fox").ids
    conversation = talk(tokenizer, *turns, pretrained_only=True, context=len(ids) + 9)
    assert conversation.prompt(10).ids == [ids[0], *ids[2:]] and conversation.dropped == 1
