"""What a request may not do, tried as an attacker would: other sites, no key, too much, too slow, too many."""

import contextlib
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from factories import PATIENCE, wait_until
from tiny_server import CONTEXT, is_free, serving, tiny_model

from extensions.serving.api import BODY_BYTES
from extensions.serving.batcher import Batcher
from extensions.serving.guard import ApiError, Guard

httpx = pytest.importorskip("httpx")
Headers = pytest.importorskip("starlette.datastructures").Headers
KEY = "key-of-this-test"
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def asked(**changes) -> dict:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, **changes}


@pytest.fixture(scope="module")
def server(prepared):
    with serving([tiny_model(prepared.tokenizer)], concurrency=2, queue=2) as server:
        yield server


@pytest.fixture(scope="module")
def public(prepared):
    """A server with a key, as if it listened at an address of the network."""
    with serving([tiny_model(prepared.tokenizer)], host="192.0.2.7", api_key=KEY) as server:
        yield server


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server[0], timeout=PATIENCE) as client:
        yield client


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while block := connection.recv(1 << 16):
            received += block
    return received


def exchange(url: str, request: bytes) -> bytes:
    with connect(url) as connection:
        connection.sendall(request)
        return read_all(connection)


def post(content: dict, *headers: str) -> bytes:
    body = json.dumps(content)
    return "\r\n".join([f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers,
                        f"Content-Length: {len(body)}", "", body]).encode()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "0.0.0.0", "", "[::2]"])
def test_a_name_that_a_site_may_have_made_lead_here_is_refused(client, host):
    host = host.format(port=client.base_url.port)
    for method, path in (("GET", "/"), ("GET", "/v1/models"), ("POST", CHAT)):
        response = client.request(method, path, headers={"Host": host}, json=asked() if method == "POST" else None)
        assert response.status_code == 400, response.text


def test_the_names_of_this_machine_are_accepted(client, public):
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:{port}", "[::1]"):
        assert client.get("/", headers={"Host": host.format(port=client.base_url.port)}).status_code == 200, host
    for host in ("192.0.2.7:8000", "10.0.0.1", socket.gethostname(), "[2001:db8::1]:80", "proxy.example"):
        assert httpx.get(public[0] + "/", headers={"Host": host}).status_code == 200, host
        assert httpx.get(public[0] + "/v1/models", headers={"Host": host}).status_code == 401, "its key protects it"


@pytest.mark.parametrize("origin", ["https|evil.example", "null", "http|localhost:1", "http|127.0.0.1:{port}.evil.example"])
def test_pages_of_other_origins_are_refused(client, server, origin):
    origin = origin.format(port=client.base_url.port).replace("|", "://")
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("OPTIONS", CHAT)):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        response = client.request(method, path, headers=headers, json=asked())
        assert response.status_code == 403, origin
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert is_free(server[1][0])
    actual = client.post(CHAT, json=asked(), headers={"Origin": f"http://127.0.0.1:{client.base_url.port}"})
    assert actual.status_code == 200 and "access-control-allow-origin" not in actual.headers


SITE = {"Origin": "https|chat.example:8443", "Host": "chat.example:8443"}


@pytest.mark.parametrize("changes, is_own", [
    ({}, True), ({"Origin": "https|evil.example:8443"}, False), ({"Host": "chat.example:8000"}, False), ({"Origin": "null"}, False),
    ({"Origin": "ftp|chat.example:8443"}, False), ({"Origin": "https|", "Host": ""}, False),
    # The proxy sends its own name of the server.
    ({"Host": "127.0.0.1:8000"}, False), ({"Host": "127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}, True),
    ({"Host": "127.0.0.1:8000", "X-Forwarded-Host": "chat.example:8443, inner"}, True),
    ({"Sec-Fetch-Site": "same-site"}, False), ({"Sec-Fetch-Site": "cross-site", "Origin": "https|evil.example"}, False),
    ({"Host": "127.0.0.1:8000", "Origin": "https|evil.example", "Sec-Fetch-Site": "cross-site"}, False)])
def test_a_page_behind_a_proxy_that_ends_tls_may_use_its_server_and_no_other_page(changes, is_own):
    headers = Headers({name: value.replace("|", "://") for name, value in {**SITE, **changes}.items()})
    guard = Guard(None, KEY, None)
    headers = Headers({**headers, "Authorization": f"Bearer {KEY}", **JSON})
    with contextlib.nullcontext() if is_own else pytest.raises(ApiError, match="X-Forwarded-Host"):
        guard.check("POST", CHAT, headers)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None, "text/plain; application/json"])
def test_a_form_of_another_site_is_refused(client, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    response = client.post(CHAT, content=json.dumps(asked()), headers=headers)
    assert response.status_code == 415 and "set Content-Type: application/json" in response.json()["error"]["message"]
    assert client.post(CHAT, content=json.dumps(asked()), headers={"Content-Type": "Application/JSON; charset=utf-8"}).status_code == 200


def test_every_response_may_neither_be_stored_nor_embedded(client):
    for response in (client.get("/"), client.get("/v1/models"), client.get("/none"), client.post(CHAT, json=asked()),
                     client.post(CHAT, json=asked(stream=True)), client.post(CHAT, json={}), client.get("/", headers={"Host": "x"})):
        assert response.headers["Cache-Control"] == "no-store" and response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["X-Frame-Options"] == "DENY" and "server" not in response.headers
    assert "default-src 'none'" in client.get("/").headers["Content-Security-Policy"]


@pytest.mark.parametrize("values", [None, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY, "Bearer \xff", f"Bearer {KEY}, Bearer {KEY}"])
def test_without_its_key_a_server_answers_nothing(public, values):
    headers = {} if values is None else {"Authorization": values.encode("latin-1")}
    with httpx.Client(base_url=public[0], headers=headers) as client:
        for response in (client.get("/v1/models"), client.get("/v1/models/tiny"), client.post(CHAT, json=asked()), client.get("/none"),
                         client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})):
            assert response.status_code == 401 and response.headers["WWW-Authenticate"] == "Bearer"
            assert response.json()["error"]["type"] == "authentication_error" and KEY not in response.text
        assert client.get("/").status_code == client.get("/health").status_code == 200
    with httpx.Client(base_url=public[0], headers={"Authorization": f"Bearer {KEY}"}) as client:
        assert client.get("/v1/models").status_code == client.post(CHAT, json=asked()).status_code == 200


def test_a_body_that_is_too_large_is_refused_by_its_length_or_as_it_comes(client, server):
    large = json.dumps(asked(messages=[{"role": "user", "content": "x" * BODY_BYTES}])).encode()
    assert client.post(CHAT, content=large, headers=JSON).status_code == 413
    blocks = (large[at:at + 10_000] for at in range(0, len(large), 10_000))
    assert client.post(CHAT, content=blocks, headers=JSON).status_code == 413, "chunked: its length is not told"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connect(server[0]) as connection:
        connection.sendall(f"{head}Content-Length: 99999999999999999\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 "), "before a byte of it has come"
    for lengths in ("Content-Length: 5\r\nContent-Length: 6\r\n", "Content-Length: -1\r\n", "Content-Length: 1e3\r\n",
                    "Transfer-Encoding: gzip\r\n", "Transfer-Encoding: chunked, chunked\r\n"):
        assert re.match(rb"HTTP/1.1 (400|501) ", exchange(server[0], f"{head}{lengths}\r\nhello".encode())), lengths


def test_the_server_answers_while_a_long_text_is_tokenized(client, server, monkeypatch):
    tokenizer, going, release = server[1][0].model.tokenizer, threading.Semaphore(0), threading.Event()
    encode = tokenizer.encode

    def slow(text: str, **options) -> list[int]:
        if "long" in text:
            going.release()
            assert release.wait(PATIENCE)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(client.post, path, json={"model": "tiny", "max_tokens": 2, **content}) for path, content in (
            ("/v1/completions", {"prompt": "long"}), (CHAT, {"messages": [{"role": "user", "content": "long"}]}))]
        try:
            assert all(going.acquire(timeout=PATIENCE) for _ in waiting)
            assert client.get("/health").status_code == client.post(CHAT, json=asked()).status_code == 200
            assert not any(answer.done() for answer in waiting)
        finally:
            release.set()
        assert [answer.result().status_code for answer in waiting] == [200, 200]


def test_a_full_queue_is_an_error_and_empties(client, server):
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(client.stream("POST", CHAT, json=asked(max_tokens=CONTEXT, stream=True))) for _ in range(4)]
        assert all(stream.status_code == 200 for stream in streams)
        refused = client.post(CHAT, json=asked())
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) > 0
        assert refused.json()["error"]["code"] == "queue_full"
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": ["x"] * 5}).status_code == 400, "it never fits"
        assert client.get("/health").status_code == 200
    wait_until(lambda: is_free(server[1][0]))
    assert client.post(CHAT, json=asked()).status_code == 200


@pytest.fixture
def only_the_first_is_limited(monkeypatch):
    """The time limit is that of the first request, so that the others may take any time."""
    submit, limits = Batcher.submit, []
    monkeypatch.setattr(Batcher, "submit", lambda self, jobs, seconds: submit(self, jobs, limits.append(seconds) or seconds if not limits else 3600))


def test_an_answer_that_takes_too_long_ends_with_an_error(prepared):
    with serving([tiny_model(prepared.tokenizer, context=100_000)], timeout_seconds=0.3, max_tokens=100_000) as (url, (batcher,)):
        late = httpx.post(url + CHAT, json=asked(max_tokens=90_000), timeout=PATIENCE)
        assert late.status_code == 504 and late.headers["x-should-retry"] == "false"
        assert late.json()["error"]["message"] == "the answer took longer than 0.3 s"
        with httpx.stream("POST", url + CHAT, json=asked(max_tokens=90_000, stream=True), timeout=PATIENCE) as stream:
            *chunks, error = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line]
        assert chunks[0]["choices"] and error["error"]["message"] == "the answer took longer than 0.3 s"
        wait_until(lambda: is_free(batcher))


def test_a_client_that_reads_nothing_blocks_no_other(prepared, only_the_first_is_limited):
    with serving([tiny_model(prepared.tokenizer, context=100_000)], send_buffer=4096, timeout_seconds=1.5, max_tokens=100_000,
                 concurrency=1) as (url, (batcher,)):
        with connect(url) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(post(asked(max_tokens=90_000, stream=True)))
            wait_until(lambda: batcher._streams)
            assert httpx.post(url + CHAT, json=asked(), timeout=PATIENCE).status_code == 200, "when the other one's time is over"
        wait_until(lambda: is_free(batcher))


@pytest.mark.parametrize("error, code, message", [
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), "out_of_memory", "out of memory"),
    (ValueError("planted"), None, r"the model failed \(ValueError\); see the server's output")])
def test_a_failure_of_the_model_ends_its_requests_and_not_the_server(client, server, capfd, error, code, message):
    batcher, messages = server[1][0], []
    wait_until(lambda: is_free(batcher))
    engine, step = batcher._engine, batcher._engine.step

    def fail():
        if len(batcher._streams) == 2:
            raise error
        return step()

    engine.step = fail
    with ThreadPoolExecutor() as threads:
        whole = threads.submit(client.post, CHAT, json=asked(max_tokens=CONTEXT))
        with client.stream("POST", CHAT, json=asked(max_tokens=CONTEXT, stream=True)) as stream:
            messages.append(json.loads([line for line in stream.iter_lines() if line][-1].removeprefix("data: ")))
        messages.append(whole.result().json())
    for each in messages:
        assert re.search(message, each["error"]["message"]) and each["error"]["code"] == code, each
    assert client.get("/health").status_code == 503
    assert client.post(CHAT, json=asked()).status_code == 200 == client.get("/health").status_code
    assert "tiny failed; its requests end with an error:" in capfd.readouterr().err
