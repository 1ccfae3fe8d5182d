"""Chats are written token for token as Meta and transformers write them, and nothing but the assistant's words is learned."""

import datetime
import hashlib
import json
import random
import re
from functools import cache
from pathlib import Path

import pytest
from factories import write_jsonl
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import DataError
from data_pipeline.chats import Example, messages_in
from data_pipeline.examples import _label_fault as label_fault
from data_pipeline.examples import kind_of_examples
from data_pipeline.source_files import Source
from data_pipeline.sources import Reading
from data_pipeline.templates import encode_rendered, load_chat_format
from data_pipeline.vocabulary import train_bpe
from extensions.inference.text import note_of_controls
from scripts import convert_to_gguf
from tokenizer import CHAT_TEMPLATE, Tokenizer, load_tokenizer

transformers = pytest.importorskip("transformers", reason="the oracle of these tests: pip install -r requirements-dev.txt")
SENTENCES = ("Anna's cat wasn't in the house; they'll look for it at 12:30 tomorrow!\n\n",
             "user system assistant \n says 12 aaaa [INST] you are\n\n1\n\na\n\n")
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Llama 2's manner: the header of an answer is plain text, and add_generation_prompt changes nothing.
BRACKETS = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}
{{- '[INST] ' ~ message.content ~ ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' ~ message.content ~ ' ' ~ eos_token }}
{%- else %}{{ raise_exception('no ' ~ message.role ~ ' here') }}{% endif %}{% endfor %}"""
DIALOG = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A cat,\n and you?"},
          {"role": "user", "content": " I ask you  \n"}, {"role": "assistant", "content": "It's me"}]


@pytest.fixture(scope="module")
def native():
    return Tokenizer(train_bpe(SENTENCES * 3, 300))


@pytest.fixture
def with_template(folder, tmp_path):
    """Make a Hugging Face tokenizer with control tokens and a chat template of its own; `flags` are the tokens' own."""

    def make(template, *names, eos="</s>", change=lambda document: None, **flags):
        document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        first = document["added_tokens"][0]
        document["added_tokens"] = [first | {"id": first["id"] + number, "content": name} | flags
                                    for number, name in enumerate(("<s>", "</s>", *names))]
        document["post_processor"] = None
        change(document)
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos}))
        (tmp_path / "chat_template.jinja").write_text(template)
        return load_tokenizer(str(tmp_path))

    return make


@pytest.mark.parametrize(("start", "system"), [
    ("{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}", "Be brief."), ("", "")])
def test_an_added_system_message_is_exported_for_ollama(with_template, start, system):
    chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template = start + chatml + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = with_template(template, "<|im_start|>", "<|im_end|>", eos="<|im_end|>")
    assert convert_to_gguf.added_system_message(tokenizer, convert_to_gguf.OLLAMA["<|im_start|>"]) == system
    assert convert_to_gguf.added_system_message(tokenizer, "{{ .Prompt }}") == ""


def flat(segments):
    return [token for ids, _ in segments for token in ids]


def by_transformers(folder, messages, **options):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, return_dict=False, **options)


def assert_as_transformers(chat_format, folder, messages):
    """The whole up to the last end of turn, and each prompt on the way."""
    segments, reference = chat_format.encode_chat(messages), by_transformers(folder, messages)
    ids = flat(segments)
    assert ids == reference[:len(ids)]
    assert chat_format.end_of_turn_id not in reference[len(ids):]
    for turn in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
        prompt = by_transformers(folder, messages[:turn], add_generation_prompt=True)
        assert chat_format.encode_prompt(messages[:turn]) == prompt == ids[:len(prompt)]


format_of = cache(load_chat_format)
messages_of = st.fixed_dictionaries({
    "role": st.sampled_from(["system", "user", "assistant"]),
    "content": st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|" not in text)})


@given(st.lists(messages_of, min_size=1))
@example([{"role": "user", "content": "\n\n hi \n"}, {"role": "assistant", "content": ""}])
def test_chat_is_the_rendered_template_token_for_token(native, hf_tokenizer, transformers_tokenizer, messages):
    rendered = transformers_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = transformers_tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert format_of(native).encode_prompt(messages) == format_of(hf_tokenizer).encode_prompt(messages) == expected


def test_the_format_is_the_tokenizers_own_or_llama_3s(native, hf_tokenizer, with_template):
    # The hash of Llama 3's format is in the names of prepared sets.
    assert load_chat_format(native).sha256 == load_chat_format(hf_tokenizer).sha256 == hashlib.sha256(b"Llama 3").hexdigest()
    chatml = load_chat_format(with_template(CHATML, "<|im_start|>", "<|im_end|>"))
    other = load_chat_format(with_template("{# other #}" + CHATML, "<|im_start|>", "<|im_end|>"))
    assert len({chatml.sha256, other.sha256, load_chat_format(native).sha256}) == 3
    tokenizer = with_template(CHATML, "<|im_start|>", "<|im_end|>")
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="start_header_id.*chat_template.jinja"):
        load_chat_format(tokenizer)


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}}
TOOL_USE = "{{ '<|tools|>' + (tools | tojson) + '<|im_end|>' }}" + CHATML.replace("message['content'] +", "message['content'] + (message.tool_calls | tojson if message.tool_calls else '') +")


@pytest.mark.parametrize("place", ["config", "files", "saved"])
def test_a_chat_with_tools_has_the_template_tool_use_as_in_transformers(place, with_template, tmp_path):
    with_template(CHATML, "<|im_start|>", "<|im_end|>", "<|tools|>", special=False)
    if place == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    else:
        (tmp_path / "chat_template.jinja").unlink()
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOL_USE}, {"name": "rag", "template": "x"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    folder, tokenizer = tmp_path, load_tokenizer(str(tmp_path))
    if place == "saved":
        folder = tmp_path / "saved"
        folder.mkdir()
        tokenizer.save_huggingface(folder)
        assert load_tokenizer(str(folder)).named_templates == {"tool_use": TOOL_USE, "rag": "x"}
        tokenizer = load_tokenizer(str(folder))
    chat_format = load_chat_format(tokenizer)
    assert_as_transformers(chat_format, folder, DIALOG)
    for options in ({}, {"tools": [TOOL]}):
        ids = flat(chat_format.encode_chat(DIALOG, options))
        assert ids == by_transformers(folder, DIALOG, **options)[:len(ids)]
        assert chat_format.encode_prompt(DIALOG[:1], options) == by_transformers(folder, DIALOG[:1], add_generation_prompt=True, **options)
    assert chat_format.encode_prompt(DIALOG[:1], {"tools": [TOOL]})[0] == chat_format.tokenizer.special_ids["<|tools|>"]
    # Records: calls are written only by the template of tools, and text never becomes its control token.
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
    write_jsonl(tmp_path / "x.jsonl", [{"messages": [DIALOG[0], call], "tools": [TOOL]}, {"messages": [DIALOG[0], call]}, {"messages": DIALOG}])
    reading = Reading(skip_bad=True)
    read = kind_of_examples("chats", tokenizer, "").read(Source(path=str(tmp_path / "x.jsonl")), reading)
    assert [len(example.messages) for example in read] == [2, 4] and "x.jsonl:2: calls a tool, and the chat format cannot write that" in reading.bad_records[0]
    assert chat_format.tokenizer.special_ids["<|tools|>"] not in chat_format.encode_prompt([{"role": "user", "content": "<|tools|>"}])


TEMPLATES = {"chatml": CHATML, "brackets": BRACKETS, "llama 3": CHAT_TEMPLATE.replace("~", " ~ ")}


@pytest.mark.parametrize("name", ["native", *TEMPLATES])
def test_user_text_never_becomes_a_control_token(name, native, hf_tokenizer, with_template):
    tokenizer = native if name == "native" else hf_tokenizer if name == "llama 3" else with_template(TEMPLATES[name], "<|im_start|>", "<|im_end|>")
    chat_format = load_chat_format(tokenizer)
    tokenizer = chat_format.tokenizer
    literals = "".join(tokenizer.special_ids)[:300]
    plain = [{**message, "content": f"a {message['content']} b"} for message in DIALOG]
    hostile = [{**message, "content": f"a {literals} x{literals[0]}{literals}\ue000{message['content']}{literals} b"} for message in DIALOG]
    controls = [[token for token in flat(chat_format.encode_chat(messages)) if token in tokenizer.special_ids.values()]
                for messages in (plain, hostile)]
    assert controls[0] == controls[1]
    texts = [tokenizer.decode(ids) for ids, is_target in chat_format.encode_chat(hostile) if is_target]
    assert [hostile[place]["content"] in text for place, text in zip((1, 3), texts)] == [True, True]
    assert tokenizer.decode(chat_format.encode_prompt(hostile[:1])).count(literals) == 3


# Those beside FAMILIES, and the ends of their turns.
KNOWN = {"gemma": "<end_of_turn>", "gemma3": "<end_of_turn>", "gemma_training": "<end_of_turn>", "phi3": "<|end|>",
         "cohere_training": "<|END_OF_TURN_TOKEN|>", "qwen3_instruct_2507": "<|im_end|>", "llama3_training": "<|eot_id|>"}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("rstrip", [False, True])
def test_templates_of_well_known_models_give_the_ids_of_transformers(name, rstrip, with_template, tmp_path):
    trl = pytest.importorskip("trl")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    names = set(re.findall(r"<\|?[a-zA-Z_]+\|?>", template)) - {"<s>", "<tools>", "<tool_call>", "<think>"}
    chat_format = load_chat_format(with_template(template, *sorted(names), rstrip=rstrip))
    assert chat_format.tokenizer.decode([chat_format.end_of_turn_id]) == KNOWN[name]
    other = [{"role": "user", "content": "12  ä\n\n"}, {"role": "assistant", "content": "日本 12"}]
    for start in ([], [{"role": "system", "content": "Be kind."}])[:1 if name in ("gemma", "gemma_training") else 2]:
        for dialog in (DIALOG, other):
            assert_as_transformers(chat_format, tmp_path, [*start, *dialog])
    if name in ("llama3_training", "cohere_training") and not rstrip:  # they mark the very same
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
        marked = loaded.apply_chat_template(DIALOG, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"]
        assert marked == [int(is_target) for ids, is_target in chat_format.encode_chat(DIALOG) for _ in ids]


def test_what_templates_are_written_with_works_as_in_transformers(with_template, tmp_path):
    template = """{% if tools is not none or documents is not none %}
    {{ raise_exception('tools?') }}
{% endif %}
{% set state = namespace(turns=0) %}
  {% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set state.turns = state.turns + 1 %}
<|im_start|>{{ message.role }} {{ {'<turn>': state.turns, "it's": 'ä'} | tojson }} {{ [1, 2] | tojson(indent=1) }}
{{ '' if message.role == 'user' }}{{ message.content }}<|im_end|>
  {% endfor %}
  {% if add_generation_prompt %}
<|im_start|>assistant {{ {'<turn>': state.turns + 1, "it's": 'ä'} | tojson }} {{ [1, 2] | tojson(indent=1) }}

  {%- endif %}
{{ '\n' if add_generation_prompt }}"""
    chat_format = load_chat_format(with_template(template, "<|im_start|>", "<|im_end|>"))
    assert_as_transformers(chat_format, tmp_path, [{"role": "system", "content": "Be kind."}, *DIALOG])
    assert "it's" in chat_format.tokenizer.decode(chat_format.encode_prompt(DIALOG[:1]))


@pytest.mark.parametrize("template, complaint", [
    (CHATML.replace("<|im_end|>", "END").replace("<|im_start|>", "BEGIN "), "ends an answer in no control token"),
    (CHATML.replace("message['content']", "'words: ' + message['content']"), "writes something else than the assistant's words"),
    ("{{ messages | length }}" + CHATML, "differs from the start of the whole chat"),
    (CHATML.replace("'<|im_end|>'", "('</s>' if loop.index == 4 else '<|im_end|>')"), "in any of"),
    (CHATML + "{% set _ = messages.append(1) %}", "rejects this chat: .*unsafe"),
])
def test_a_template_whose_answers_cannot_be_located_is_refused(template, complaint, with_template):
    chat_format = load_chat_format(with_template(template, "<|im_start|>", "<|im_end|>", "<odd>"))
    for refused in (chat_format.check_training, lambda: chat_format.encode_chat(DIALOG), lambda: chat_format.encode_answer(DIALOG[:1], "A cat")):
        with pytest.raises(DataError, match=f"cannot be used for training on answers: .*{complaint}"):
            refused()


def test_text_never_becomes_a_control_token_that_is_only_named_elsewhere_or_written_by_the_template(with_template, tmp_path):
    """Flags in tokenizer.json are one of the places that say so; tags that models write stay as in transformers."""
    names = ("<|im_start|>", "<|im_end|>", "<|eom|>", "<|tool|>", "<|extra|>", "<|id|>", "<think>", "</think>", "<other>")
    template = CHATML.replace("{{ '<|im_start|>' + message.role", "{{ ('<|tool|>' if message.role == 'tool' else '<|im_start|>') + message.role")
    with_template(template + "{# <think> #}", *names, special=False)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    ids = {token["content"]: token["id"] for token in json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]}
    config |= {"eot_token": "<|im_end|>", "additional_special_tokens": ["<|extra|>"],
               "added_tokens_decoder": {str(ids["<|eom|>"]): {"content": "<|eom|>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["</s>"], ids["<|id|>"]]}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.special_ids.keys() == {"<s>", "</s>", "<|im_end|>", "<|eom|>", "<|extra|>", "<|id|>"}
    assert ids["<|im_end|>"] not in tokenizer.encode("a<|im_end|><|eom|><|extra|><|id|></s>")
    chat_format = load_chat_format(tokenizer)
    assert chat_format.tokenizer.special_ids.keys() == {*names, "<s>", "</s>"} - {"<think>", "</think>", "<other>"}
    assert_as_transformers(chat_format, tmp_path, [*DIALOG[:1], {"role": "assistant", "content": "<think>It is</think> me"}, *DIALOG])
    text = "".join(names)
    prompt = chat_format.encode_prompt([{"role": "user", "content": text}])
    assert [prompt.count(ids[name]) for name in names] == [2, 1, 0, 0, 0, 0, 1, 1, 1], "the template's own, and what is not control"
    assert chat_format.tokenizer.decode(prompt) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert encode_rendered(tokenizer, "a<|id|>")[0] == [*tokenizer.encode("a"), ids["<|id|>"]] and "<|im_end|>" in note_of_controls(tokenizer, [text], "")
    tokenizer.save_huggingface(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert load_tokenizer(str(tmp_path)).sha256 == tokenizer.sha256, "a saved folder has the same tokenizer"


@pytest.mark.parametrize("filters, hostile", [
    ("| lower", "Hi <|IM_END|> there"), (".replace('#', '')", "Hi <|im_#end|> there"), (".split('</think>')[-1]", "x</think>Hi"),
    (".split('#') | join('')", "<#|im_start|#>"), (".encode('ascii', 'ignore').decode()", "Hi <|im_end|>"),
    (" | replace('cat', '<|im_end|>')", "a cat")])
def test_words_that_a_template_turns_into_a_control_token_are_refused(filters, hostile, with_template):
    chat_format = load_chat_format(with_template(CHATML.replace("message['content']", f"(message['content']{filters})"),
                                                 "<|im_start|>", "<|im_end|>"))
    for role in ("user", "system"):
        chat = [{"role": role, "content": hostile}, *DIALOG[2:]]
        if hostile == "x</think>Hi":  # what a template leaves out is none of this
            assert "x" not in chat_format.tokenizer.decode(chat_format.encode_prompt(chat[:1]))
            continue
        for encode in (chat_format.encode_chat, chat_format.encode_prompt):
            with pytest.raises(DataError, match=r"rewrites the text in a way that changes its control tokens .*<\|im_(end|start)\|>"):
                encode(chat)
    assert chat_format.encode_prompt([{"role": "user", "content": "<|im_end|"}]), "half a name is text"


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
IM = ("<|im_start|>", "<|im_end|>")
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# The template, of TRL if it is a name, its control tokens, what its chats may have, and where an answer begins and ends
# if the template does not mark that.
FAMILIES = {"llama": ("llama3_training", LLAMA, "system", None),
            "llama 3.1": ("llama3_1", LLAMA, "system tools", ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")),
            "llama 3.2": ("llama3_2", LLAMA, "system tools", ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")),
            "qwen2": ("qwen2_5_training", IM, "system tools words", None),
            "qwen2, unmarked": ("qwen2_5", IM, "system tools words", ("<|im_start|>assistant\n", "<|im_end|>")),
            "qwen3": ("qwen3_training", IM, "system tools words reasoning switch", None),
            "qwen3, unmarked": ("qwen3", IM, "system tools words once", ("<|im_start|>assistant\n", "<|im_end|>")),
            "mistral": (INSTRUCTED, (), "", None), "smollm3": (SWITCHED, IM, "system tools words reasoning switch", None)}


class Day(datetime.datetime):
    @classmethod
    def now(cls):
        return cls(2024, 7, 26)


def some_words(chance: random.Random, most: int = 8) -> str:
    return " ".join(chance.choice(["cat", "it's", "12:30", "ä", "日本", "<tool_call>", "{\"a\": 1}", "<|eot_id|>", "a\n\nb", "\\", "'"])
                    for _ in range(chance.randint(1, most)))


def conversation(chance: random.Random, may: str) -> tuple[list[dict], dict]:
    """A chat and the variables of its template. With `once`, a single question, answered with reasoning."""
    messages = [{"role": "system", "content": some_words(chance)}] if "system" in may and chance.random() < 0.5 else []
    options = {"tools": TOOLS} if "tools" in may and chance.random() < 0.7 else {}
    if "switch" in may and chance.random() < 0.5:
        options["enable_thinking"] = chance.random() < 0.5
    for _ in range(1 if "once" in may else chance.randint(1, 3)):
        messages.append({"role": "user", "content": f"{some_words(chance)} ?"})
        while True:
            answer = {"role": "assistant", "content": some_words(chance)}
            if ("reasoning" in may or "once" in may) and options.get("enable_thinking", True) and chance.random() < 0.6:
                answer["reasoning_content"] = some_words(chance, 20)
            calls = chance.randint(0, 1 + ("words" in may)) if options.get("tools") else 0
            if calls and not ("words" in may and chance.random() < 0.5):
                answer["content"] = ""
            arguments = [{"city": some_words(chance), some_words(chance): [chance.random(), None, {"x": True}]} for _ in range(calls)]
            if calls:
                answer["tool_calls"] = [{"id": f"call{number}", "type": "function", "function": {"name": chance.choice(["look_up", "add"]),
                                         "arguments": each}} for number, each in enumerate(arguments)]
            messages.append(answer)
            messages += [{"role": "tool", "name": "add", "tool_call_id": f"call{number}", "content": some_words(chance)} for number in range(calls)]
            if not calls or chance.random() < 0.1:
                break
        if calls:  # the chat ends in a call
            while messages[-1]["role"] == "tool":
                messages.pop()
            break
    return messages, options


CHATS = 40  # of each family; rare parts of a chat are in a tenth of them


@pytest.mark.parametrize("family", FAMILIES)
def test_random_chats_have_the_ids_and_masks_of_transformers(family, with_template, tmp_path, monkeypatch):
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


def test_reasoning_that_a_template_leaves_out_is_refused(with_template):
    template = (Path(pytest.importorskip("trl").__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    chat_format = load_chat_format(with_template(template, *IM))
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}]
    assert "Hm." in chat_format.tokenizer.decode(flat(chat_format.encode_chat(turns)))
    with pytest.raises(DataError, match="leaves out reasoning.*a chat for each answer"):
        chat_format.encode_chat(turns * 2)
