"""Chats with tools, reasoning and switches have the ids and masks of transformers, in the templates of each family."""

import datetime
import random
from pathlib import Path

import pytest
from test_chat_templates import flat, native, with_template  # noqa: F401

from common.errors import DataError
from data_pipeline.chats import Example, messages_in
from data_pipeline.examples import _label_fault as label_fault
from data_pipeline.templates import load_chat_format

transformers = pytest.importorskip("transformers", reason="the oracle of these tests: pip install -r requirements-dev.txt")

TOOLS = [{"type": "function", "function": {"name": name, "description": f"It may {name} <|im_end|> ä", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}} for name in ("look_up", "add")]
# In the manner of SmolLM 3: a date, a switch that the system's message explains, and marks that include the header.
SWITCHED = """{%- set mode = "/no_think" if enable_thinking is defined and not enable_thinking else "/think" %}
{{- "<|im_start|>system\n## Today: " ~ strftime_now("%d %B %Y") ~ "\nMode: " ~ mode ~ "\n\n" }}
{%- if messages[0].role == "system" %}{{- messages[0].content.rstrip() }}{%- endif %}
{%- if tools %}{{- "\n### Tools\n<tools>\n" }}{%- for tool in tools %}{{- tool | string ~ "\n" }}{%- endfor %}{{- "</tools>" }}{%- endif %}
{{- "<|im_end|>\n" }}
{%- for message in messages %}
    {%- if message.role == "user" %}{{ "<|im_start|>user\n" + message.content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" %}
        {%- generation %}
        {{- "<|im_start|>assistant\n" }}
        {%- if mode == "/no_think" %}{{- "<think>\n\n</think>\n" }}
        {%- elif message.reasoning_content %}{{- "<think>" + message.reasoning_content + "</think>" }}{%- endif %}
        {{- message.content.lstrip("\n") }}
        {%- for call in message.tool_calls or [] %}
            {{- "<tool_call>" ~ {"name": call.function.name, "arguments": call.function.arguments} | tojson ~ "</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\n" }}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}{{ "<|im_start|>user\n" + message.content + "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" ~ ("<think>\n\n</think>\n" if mode == "/no_think" else "") }}{%- endif %}"""
INSTRUCTED = """{{ bos_token }}{%- for message in messages %}
    {%- if message.role == "user" %}{{- "[INST] " + message.content + " [/INST]" }}
    {%- elif message.role == "assistant" %}{% generation %}{{ " " + message.content.strip() + eos_token }}{% endgeneration %}
    {%- else %}{{ raise_exception("Only user and assistant roles are supported!") }}{%- endif %}{%- endfor %}"""
CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# The template, of TRL if it is a name, its control tokens, what its chats may have, and where an answer begins and ends
# if the template does not mark that.
FAMILIES = {"llama": ("llama3_training", LLAMA, "system", None),
            "llama 3.1": ("llama3_1", LLAMA, "system tools", ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")),
            "llama 3.2": ("llama3_2", LLAMA, "system tools", ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")),
            "qwen2": ("qwen2_5_training", CHATML, "system tools words", None),
            "qwen2, unmarked": ("qwen2_5", CHATML, "system tools words", ("<|im_start|>assistant\n", "<|im_end|>")),
            "qwen3": ("qwen3_training", CHATML, "system tools words reasoning switch", None),
            "qwen3, unmarked": ("qwen3", CHATML, "system tools words once", ("<|im_start|>assistant\n", "<|im_end|>")),
            "mistral": (INSTRUCTED, (), "", None), "smollm3": (SWITCHED, CHATML, "system tools words reasoning switch", None)}


class Day(datetime.datetime):
    @classmethod
    def now(cls):
        return cls(2024, 7, 26)


def words(chance: random.Random, most: int = 8) -> str:
    return " ".join(chance.choice(["cat", "it's", "12:30", "ä", "日本", "<tool_call>", "{\"a\": 1}", "<|eot_id|>", "a\n\nb", "\\", "'"])
                    for _ in range(chance.randint(1, most)))


def conversation(chance: random.Random, may: str) -> tuple[list[dict], dict]:
    """A chat and the variables of its template. With `once`, a single question, answered with reasoning."""
    messages = [{"role": "system", "content": words(chance)}] if "system" in may and chance.random() < 0.5 else []
    options = {"tools": TOOLS} if "tools" in may and chance.random() < 0.7 else {}
    if "switch" in may and chance.random() < 0.5:
        options["enable_thinking"] = chance.random() < 0.5
    for _ in range(1 if "once" in may else chance.randint(1, 3)):
        messages.append({"role": "user", "content": f"{words(chance)} ?"})
        while True:
            answer = {"role": "assistant", "content": words(chance)}
            if ("reasoning" in may or "once" in may) and options.get("enable_thinking", True) and chance.random() < 0.6:
                answer["reasoning_content"] = words(chance, 20)
            calls = chance.randint(0, 1 + ("words" in may)) if options.get("tools") else 0
            if calls and not ("words" in may and chance.random() < 0.5):
                answer["content"] = ""
            arguments = [{"city": words(chance), words(chance): [chance.random(), None, {"x": True}]} for _ in range(calls)]
            if calls:
                answer["tool_calls"] = [{"id": f"call{number}", "type": "function", "function": {"name": chance.choice(["look_up", "add"]),
                                         "arguments": each}} for number, each in enumerate(arguments)]
            messages.append(answer)
            messages += [{"role": "tool", "name": "add", "tool_call_id": f"call{number}", "content": words(chance)} for number in range(calls)]
            if not calls or chance.random() < 0.1:
                break
        if calls:  # the chat ends in a call
            while messages[-1]["role"] == "tool":
                messages.pop()
            break
    return messages, options


CHATS = 40  # of each family; rare parts of a chat are in a tenth of them


@pytest.mark.parametrize("family", FAMILIES)
def test_random_chats_have_the_ids_and_masks_of_transformers(family, with_template, tmp_path, monkeypatch):  # noqa: F811
    name, controls, may, ends = FAMILIES[family]
    if "{" not in name:
        folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
        name = (folder / f"{name}.jinja").read_text(encoding="utf-8")
    chat_format = load_chat_format(with_template(name, *controls))
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Day)
    chance, chats = random.Random(family), 0
    while chats < CHATS:
        messages, options = conversation(chance, may)
        literals = [text for text in (str(messages), str(options)) for control in (*controls, "</s>") if control in text]
        values = {"date_string": "26 Jul 2024"} if family == "llama 3.2" else {}
        read = messages_in("messages", messages)
        assert read == messages
        segments = chat_format.encode_chat(read, options | values)
        assert label_fault(Example("", read), segments, chat_format) is None
        if literals:  # transformers makes control tokens of what people write
            continue
        chats += 1
        reference = hf_tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=ends is None, **options, **values)
        ids, mask = reference["input_ids"], reference.get("assistant_masks")
        if ends:
            text, pieces = hf_tokenizer.decode(ids), []
            for index, piece in enumerate(text.split(ends[0])):
                answer_text, found, rest = piece.partition(ends[1]) if index else ("", "", piece)
                pieces += [(answer_text + found, 1), (rest + ends[0], 0)]
            pieces[-1] = (pieces[-1][0].removesuffix(ends[0]), 0)
            encoded = [(hf_tokenizer.encode(text, add_special_tokens=False), flag) for text, flag in pieces]
            assert [token for each, _ in encoded for token in each] == ids
            mask = [flag for each, flag in encoded for _ in each]
        targets = [int(is_target) for part, is_target in segments for _ in part]
        assert flat(segments) == ids[:len(targets)] and targets == mask[:len(targets)] and not any(mask[len(targets):])
        turn = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
        prompt = chat_format.encode_prompt(read[:turn], options | values)
        assert prompt == hf_tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, return_dict=False, **options, **values)
        if "tool_calls" not in messages[-1]:
            answer = chat_format.encode_answer(read[:turn], read[turn], options | values)
            assert (prompt + answer)[:len(ids)] == ids[:len(prompt + answer)]


def test_reasoning_that_a_template_leaves_out_is_refused(with_template):  # noqa: F811
    template = (Path(pytest.importorskip("trl").__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    chat_format = load_chat_format(with_template(template, *CHATML))
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}]
    assert "Hm." in chat_format.tokenizer.decode(flat(chat_format.encode_chat(turns)))
    with pytest.raises(DataError, match="leaves out reasoning.*a chat for each answer"):
        chat_format.encode_chat(turns * 2)
