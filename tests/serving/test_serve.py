"""A server as a process: what it prints, what it refuses to do, and how it ends."""

import contextlib
import json
import os
import signal
import socket
import time

import pytest
from commands import listening
from factories import PATIENCE, start, wait_until
from tiny_server import CONTEXT, tiny_model

from common.errors import SettingsError, run_script
from extensions.inference.engine import Engine
from extensions.serving.app import ServeOptions, serve

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": CONTEXT, "stream": True}


def serve_tiny(tokenizer_path, stuck: bool = False) -> None:
    """Serve a tiny model at a free port.

    Args:
        stuck: a step after the first ones does not end.
    """
    def main() -> None:
        model = tiny_model(tokenizer_path)
        step, calls = Engine.step, iter(range(10**9))

        def stuck_step(engine):
            if next(calls) > 20:
                time.sleep(10 * PATIENCE)
            return step(engine)

        if stuck:
            Engine.step = stuck_step
        serve([model], ServeOptions(port=0))

    run_script(main)


@pytest.fixture
def job(request, prepared, tmp_path):
    job = start(serve_tiny, prepared.tokenizer, getattr(request, "param", False), folder=tmp_path)
    wait_until(lambda: "(Ctrl-C stops it)" in job.text())
    yield job
    job.processes[0].kill()
    job.processes[0].join()


def url_of(job) -> str:
    return job.text().split("  (Ctrl-C stops it)")[0].rstrip("/")


@contextlib.contextmanager
def streaming(job):
    with httpx.stream("POST", url_of(job) + "/v1/chat/completions", json=ASKED, timeout=PATIENCE) as stream:
        lines = (line for line in stream.iter_lines() if line)
        assert "choices" in next(lines) and "choices" in next(lines)
        yield lines


def test_it_listens_on_loopback_only_and_prints_its_address(job):
    assert httpx.get(url_of(job) + "/health").json() == {"status": "ok"}
    (address, port), = listening(job.processes[0].pid)
    assert str(address) == "127.0.0.1" and url_of(job) == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("job", [False, True], indirect=True, ids=["", "in a step that does not end"])
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_streams_with_an_error_and_the_process(job, number, code):
    with streaming(job) as lines, socket.create_connection(("127.0.0.1", int(url_of(job).rpartition(":")[2]))):
        os.kill(job.processes[0].pid, number)
        *_, last = lines
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is stopping"
    job.processes[0].join(PATIENCE)
    assert job.processes[0].exitcode == code
    assert job.text().partition("(Ctrl-C stops it)")[2].strip() == ("Stopped." if code == 130 else "")


def test_a_crash_ends_streams(job):
    with pytest.raises(httpx.RemoteProtocolError), streaming(job) as lines:
        os.kill(job.processes[0].pid, signal.SIGKILL)
        assert "[DONE]" not in [*lines][-1]


def test_a_model_that_cannot_be_served_is_a_one_line_error(prepared):
    model = tiny_model(prepared.tokenizer)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        cases = [(ServeOptions(port=port), f"--port {port} is in use; --port 0 picks a free one"),
                 (ServeOptions(host="0.0.0.0"), "--host 0.0.0.0 .*PADDOCK_API_KEY"),
                 (ServeOptions(host="192.0.2.7", api_key="x", port=0), "--host 192.0.2.7 is not an address of this machine; 0.0.0.0"),
                 (ServeOptions(host="no.invalid", api_key="x", port=0), "--host no.invalid is not an address of this machine"),
                 (ServeOptions(api_key="a key"), "PADDOCK_API_KEY cannot be sent in a header")]
        for options, message in cases:
            with pytest.raises(SettingsError, match=message):
                serve([model], options)
    with pytest.raises(SettingsError, match="tiny is named twice"):
        serve([model, model], ServeOptions(port=0))
