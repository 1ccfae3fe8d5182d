"""The API as OpenAI's own client uses it: chats, completions, streams, usage, errors, and what is cancelled."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from factories import wait_until
from tiny_server import CONTEXT, is_free, serving, tiny_model

from checkpoint.huggingface import save_model_folder
from extensions.inference import engine
from extensions.inference.text import LanguageModel
from extensions.serving.app import ServeOptions
from tokenizer import load_tokenizer

httpx = pytest.importorskip("httpx")


def openai():
    """The client library; not imported with this file, which each worker of pytest does."""
    return pytest.importorskip("openai")


HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def models(prepared):
    return [tiny_model(prepared.tokenizer), tiny_model(prepared.tokenizer, "other", seed=2)]


@pytest.fixture(scope="module")
def server(models):
    with serving(models, concurrency=4, queue=4) as server:
        yield server


@pytest.fixture
def client(server):
    with openai().OpenAI(base_url=f"{server[0]}/v1", api_key="any", max_retries=0) as client:
        yield client


def chat(client, **changes):
    return client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0, **changes})


def complete(client, prompt="The cat", **changes):
    return client.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, **changes})


def test_a_chat_is_answered_whole_and_as_a_stream_the_same(client, models):
    whole = chat(client)
    answer = whole.choices[0]
    assert answer.finish_reason == "length" and answer.message.role == "assistant" and answer.message.content
    assert whole.usage.prompt_tokens == len(models[0].chat_prompt(HELLO).ids) and whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == [] and last.usage == whole.usage


def test_a_seed_decides_the_text_also_beside_other_requests(client):
    sampled = {"temperature": 1.0, "top_p": 0.9, "extra_body": {"top_k": 50}, "max_tokens": 24}
    alone = chat(client, seed=5, **sampled).choices[0].message.content
    assert chat(client, seed=6, **sampled).choices[0].message.content != alone
    assert chat(client, **sampled).choices[0].message.content != chat(client, **sampled).choices[0].message.content
    with ThreadPoolExecutor(8) as threads:
        texts = [*threads.map(lambda seed: chat(client, seed=seed, **sampled).choices[0].message.content, range(8))]
    assert texts[5] == alone and len({*texts}) == 8


def test_a_stop_string_ends_the_text_before_it_and_frees_the_row(client, server, monkeypatch):
    engine, cancelled = server[1][0]._engine, []
    cancel = engine.cancel
    monkeypatch.setattr(engine, "cancel", lambda request: (cancel(request), cancelled.append(request.finish_reason)))
    sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    text = complete(client, **sampled).choices[0].text
    stop = text[len(text) // 2:][:3]
    ended = complete(client, stop=stop, **{**sampled, "max_tokens": CONTEXT}).choices[0]
    assert ended.finish_reason == "stop" and ended.text == text[:text.index(stop)]
    streamed = [*complete(client, stop=["never", stop], stream=True, **sampled)]
    assert "".join(chunk.choices[0].text for chunk in streamed) == ended.text
    assert streamed[-1].choices[0].finish_reason == "stop"
    wait_until(lambda: is_free(server[1][0]))
    assert cancelled.count("cancelled") == 2


def test_an_answer_whose_client_disconnects_is_not_continued(client, server, monkeypatch):
    engine, ended = server[1][0]._engine, []
    cancel, step = engine.cancel, engine.step
    monkeypatch.setattr(engine, "cancel", lambda request: (cancel(request), ended.append(request.finish_reason)))
    monkeypatch.setattr(engine, "step", lambda *arguments: (time.sleep(0.05), step(*arguments))[1])  # slower than the client
    stream = complete(client, stream=True, max_tokens=60, temperature=1.0, seed=3)
    next(iter(stream))
    stream.close()
    wait_until(lambda: is_free(server[1][0]))
    assert ended == ["cancelled"]


def test_control_tokens_in_a_prompt_are_reported_and_can_be_parsed(client, models):
    tokenizer = models[0].tokenizer
    text = "a<|eot_id|>b"
    ids = [tokenizer.document_start_id, *tokenizer.encode("a"), tokenizer.eot_id, *tokenizer.encode("b")]
    output, meant, by_id = complete(client, text), complete(client, text, extra_body={"parse_special": True}), complete(client, ids)
    assert output.warning.startswith("<|eot_id|> in the prompt is encoded as text") and "parse_special=true" in output.warning
    assert output.usage.prompt_tokens > meant.usage.prompt_tokens == by_id.usage.prompt_tokens == len(ids)
    assert meant.choices[0].text == by_id.choices[0].text and not hasattr(meant, "warning") and not hasattr(complete(client), "warning")
    assert [each.text for each in complete(client, [ids, ids]).choices] == [by_id.choices[0].text] * 2
    assert [*complete(client, text, stream=True)][0].warning == output.warning
    for prompt, message in ((ids + [512], "512 is not a token id"), ([[]], "expected a text"), ([1, "a"], "expected a text"), ([True], "expected")):
        with pytest.raises(openai().BadRequestError, match=message):
            complete(client, prompt)


@pytest.fixture(scope="module")
def reference(models, tmp_path_factory, transformers):
    """A function that returns transformers' logits after each token of a list."""
    import torch
    folder = tmp_path_factory.mktemp("exported")
    save_model_folder(folder, models[0].model.state_dict(), models[0].model.config, models[0].tokenizer, CONTEXT)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return lambda ids: model(torch.tensor([ids])).logits[0].detach()


def test_logprobs_are_the_log_softmax_of_the_logits(client, server, models, reference, monkeypatch):
    def text_of(token: int) -> str:
        return models[0].tokenizer.decode([0, token]).removeprefix(models[0].tokenizer.decode([0]))

    engine, prompt, done = server[1][0]._engine, models[0].chat_prompt(HELLO).ids, []
    cancel = engine.cancel
    monkeypatch.setattr(engine, "cancel", lambda request: (cancel(request), done.append(request.output_ids)))
    requested = {"logprobs": True, "top_logprobs": 5, "temperature": 2.0, "seed": 1, "extra_body": {"repetition_penalty": 1.3},
             "presence_penalty": 0.5}
    whole = chat(client, **requested).choices[0]
    entries = whole.logprobs.content
    written = done[0]
    assert len(written) == 12
    logprobs_TV = reference([*prompt, *written])[len(prompt) - 1:-1].log_softmax(-1)
    for entry, token, logprobs_V in zip(entries, written, logprobs_TV):
        assert entry.logprob == pytest.approx(float(logprobs_V[token]), abs=1e-4)
        best = logprobs_V.topk(5)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [one.token for one in entry.top_logprobs] == [text_of(id) for id in best.indices.tolist()]
        assert entry.bytes is None if "\ufffd" in entry.token else bytes(entry.bytes).decode() == entry.token == text_of(token)
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **requested)]
    streamed = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    for actual, entry in zip(streamed, entries, strict=True):  # the last bit may follow where the memory begins
        for one, other in zip((actual, *actual.top_logprobs), (entry, *entry.top_logprobs), strict=True):
            assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=1e-5)
    text = complete(client, logprobs=2).choices[0]
    assert len(text.logprobs.tokens) == len(text.logprobs.token_logprobs) == 12 and len(text.logprobs.top_logprobs[0]) == 2
    assert complete(client, logprobs=0).choices[0].logprobs.token_logprobs == text.logprobs.token_logprobs
    assert chat(client).choices[0].logprobs is None


@pytest.mark.parametrize("presence, frequency", [(-0.5, 1.1), (0.3, -0.25)])
def test_penalties_are_subtracted_by_openais_formula(presence, frequency, client, models, reference):
    """logits - presence * (count > 0) - frequency * count, where the prompt does not count."""
    import torch
    prompt, written = models[0].chat_prompt(HELLO).ids, []
    for _ in range(30):
        counts_V = torch.bincount(torch.tensor(written, dtype=torch.long), minlength=512)
        logits_V = reference([*prompt, *written])[-1]
        written.append(int((logits_V - presence * (counts_V > 0) - frequency * counts_V).argmax()))
    answer = chat(client, max_tokens=30, presence_penalty=presence, frequency_penalty=frequency).choices[0].message.content
    assert answer == models[0].tokenizer.decode(written)
    assert answer != chat(client, max_tokens=30).choices[0].message.content


def test_n_answers_have_seeds_that_count_up(client):
    sampled = {"temperature": 1.0, "seed": 5}
    several = chat(client, n=3, **sampled)
    alone = [chat(client, **{**sampled, "seed": 5 + number}) for number in range(3)]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert [choice.message.content for choice in several.choices] == [each.choices[0].message.content for each in alone]
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens and several.usage.completion_tokens == 36
    chunks = [*chat(client, n=3, stream=True, **sampled)]
    assert [chunk.choices[0].delta.role for chunk in chunks[:3]] == ["assistant"] * 3
    texts = [choice.text for choice in complete(client, ["The cat", "A dog"], n=2, **sampled).choices]
    assert texts == [complete(client, prompt, **{**sampled, "seed": seed}).choices[0].text for prompt in ("The cat", "A dog") for seed in (5, 6)]


def test_the_server_limits_how_far_a_prompt_is_continued(prepared):
    assert ServeOptions().max_tokens == 4096
    with serving([tiny_model(prepared.tokenizer)], max_tokens=7) as (url, _), \
            openai().OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        for requested, values in ((None, 7), (12, 7), (7, 7), (3, 3)):
            for answer in (complete(client, max_tokens=requested), chat(client, max_tokens=requested)):
                assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (values, "length")


TOOL = {"type": "function", "function": {"name": "f"}}
REFUSED = [
    ({"model": "none"}, 404, "model", "there is no model 'none'; choose from 'tiny', 'other'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages", "tiny cannot read tool calls"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages", r"messages\[0\] has the role 'robot'; known are system"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400,
     "messages", r"messages\[0\].content\[0\] is not text, its type is 'image_url'"),
    ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"), ({"n": 9}, 400, "prompt", "at most 8"),
    *(({field: wanted}, 400, field, f"{field} is not supported; leave it out, or serve the model with vLLM, which has it$")
      for field, wanted in (("tools", [TOOL]), ("tool_choice", "required"), ("response_format", {"type": "json_object"}))),
    ({"stop": list("abcde")}, 400, "stop", "at most 4"), ({"extra_body": {"tempratur": 1}}, 400, "tempratur", "not supported"),
    ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, 400, "messages",
     rf"messages: the prompt has 20\d\d tokens; the context has room for {CONTEXT}, including at least one for the answer")]


@pytest.mark.parametrize("changes, status, param, message", REFUSED, ids=[f"{row[2]}-{number}" for number, row in enumerate(REFUSED)])
def test_what_cannot_be_done_is_refused_by_name(client, changes, status, param, message):
    kind = {400: openai().BadRequestError, 404: openai().NotFoundError}[status]
    with pytest.raises(kind, match=message) as refused:
        chat(client, **changes)
    assert refused.value.param == param and str(refused.value.message).count("\n") == 0


@pytest.mark.parametrize("body, message", [
    (b"", "not valid JSON"), (b"{", "not valid JSON"), (b"[]", "must be a JSON object"), (b"null", "must be a JSON object"),
    (b'{"model": "tiny", "messages": "\xff"}', "not valid JSON"), (b'{"model": "tiny", "messages": "\\ud800"}', "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"), (b'{"model": "tiny", "temperature": NaN}', "temperature"),
    (b'{"model": "tiny", "temperature": 1e999}', "temperature"), (b'{"model": "tiny", "max_tokens": 1' + b"0" * 5000 + b"}", "")])
def test_what_is_no_request_is_refused(server, body, message):
    response = httpx.post(f"{server[0]}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and message in response.json()["error"]["message"], response.text


@pytest.fixture(scope="module")
def with_tools(prepared, tmp_path_factory):
    """A server of a model whose template has tools, and the model; its end of turn ends answers."""
    folder, model = tmp_path_factory.mktemp("qwen3"), tiny_model(prepared.tokenizer)
    model.tokenizer.save_huggingface(folder)
    template = (Path(pytest.importorskip("trl").__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    for name, known in (("<|im_start|>", "<|start_header_id|>"), ("<|im_end|>", "<|eot_id|>")):
        template = template.replace(name, known)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with serving([LanguageModel("tiny", model.model, load_tokenizer(str(folder)), CONTEXT)]) as (url, batchers), \
            openai().OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client, batchers[0].model


def scripted(monkeypatch, ids: list[int]) -> None:
    def take(self, token):
        if len(self.output_ids) == len(ids):
            self.finish_reason = "stop"
        else:
            self.output_ids.append(ids[len(self.output_ids)])

    monkeypatch.setattr(engine.Request, "take", take)


def test_tools_calls_and_results_are_context(with_tools):
    client, model = with_tools
    call, result = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}, {"role": "tool", "tool_call_id": "c1", "content": "It rains."}
    ids = model.chat_prompt([*HELLO, {"role": "assistant", "content": "", "tool_calls": [{**call, "function": {"name": "f", "arguments": {}}}]}, result]).ids
    assert "It rains." in model.tokenizer.decode(ids)
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert chat(client, messages=messages, max_tokens=1).usage.prompt_tokens == len(ids)
    ids = model.chat_prompt(HELLO, {"tools": [TOOL]}).ids
    usage = chat(client, extra_body={"chat_template_kwargs": {"tools": [TOOL]}}, max_tokens=1).usage
    assert usage.prompt_tokens == len(ids) > len(model.chat_prompt(HELLO).ids)


@pytest.mark.parametrize("written, reasoning, content", [
    ("<think>\nIs it 1 < 2?\n\n</thin\n</think>\n\nIt is. </think>", "\nIs it 1 < 2?\n\n</thin\n", "\n\nIt is. </think>"),
    ("<think>\nI wonder </th", "\nI wonder </th", None),
    (" <thin", None, " <thin"), ("So <think>x</think>", None, ...)])
def test_reasoning_is_returned_beside_the_content(with_tools, monkeypatch, written, reasoning, content):
    client, model = with_tools
    scripted(monkeypatch, model.tokenizer.encode(written))
    ask = partial(chat, client, max_tokens=500)
    message = ask().choices[0].message
    content = written if content is ... else content
    assert (message.content, getattr(message, "reasoning_content", None), message.tool_calls) == (content, reasoning, None)
    deltas = [chunk.choices[0].delta for chunk in ask(stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == (reasoning or "")
    assert "".join(delta.content or "" for delta in deltas) == (content or "")
    if reasoning and content:  # or the prompt opens the tags
        scripted(monkeypatch, model.tokenizer.encode(written.removeprefix("<think>")))
        known = model.chat_prompt
        monkeypatch.setattr(model, "chat_prompt", lambda *given: known(*given)._replace(ids=[*known(*given).ids, *model.tokenizer.encode("<think>")]))
        assert ask().choices[0].message.reasoning_content == reasoning
