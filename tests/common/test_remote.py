"""A failure that may pass is met with patience, any other at once; a file behind a URL arrives whole whatever the line does."""

import gzip
import json
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest

from common import remote
from common.errors import DataError
from common.remote import TRIES, hub_folder, is_transient
from data_pipeline import remote_data
from data_pipeline.source_files import Source, list_files
from data_pipeline.sources import Reading, read_texts

LINES = [json.dumps({"text": f"document {number} " + "x" * 500}) + "\n" for number in range(400)]
CONTENT = "".join(LINES).encode()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.001)


class Server(ThreadingHTTPServer):
    """Serves files, after what it has been told to do wrong first: an HTTP status, "cut" (in the middle), or "drop" (at once)."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.faults, self.asked = files, [], []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address) -> None:
        pass  # a client that left


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.command)
        fault = self.server.faults.pop(0) if self.server.faults and (
            self.server.faults[0] != "cut" or self.command == "GET") else None
        body = self.server.files.get(self.path)
        if fault == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if isinstance(fault, int) or body is None:
            self.send_response(fault or 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:len(body) // 2] if fault == "cut" else body)
        if fault == "cut":
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    do_HEAD = do_GET


@pytest.fixture
def server():
    server = Server({"/x.jsonl": CONTENT, "/x.jsonl.gz": gzip.compress(CONTENT)})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def texts(url: str) -> list[str]:
    return [json.dumps({"text": document.text}) + "\n" for document in read_texts(Source(path=url), Reading())]


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
@pytest.mark.parametrize("faults", [[], [503, 503], [429, 500, 502, 504], ["drop", "drop"], ["cut", "cut", 503, "cut"]], ids=str)
def test_a_file_behind_a_url_arrives_whole_whatever_the_line_does(server, name, faults, capfd):
    files = list_files(Source(path=f"{server.url}/{name}"))  # the listing has its own requests, and patience
    assert [file.format for file in files] == ["jsonl"]
    server.faults = [*faults]
    assert texts(f"{server.url}/{name}") == LINES
    assert not server.faults
    messages = capfd.readouterr().err.splitlines()
    assert all("retrying in" in line for line in messages), messages
    assert bool(messages) == bool(faults) or "drop" in faults, "after these the client itself asks once more"


def test_a_download_leaves_no_file_has_no_time_limit_and_names_tmpdir_where_it_has_no_room(server, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file, = list_files(Source(path=f"{server.url}/x.jsonl"))
    with file.open() as content:
        assert content.read(9) == CONTENT[:9] and not list(tmp_path.iterdir())
    assert file.fs.client_kwargs["timeout"].total is None
    assert file.identity({}, None) == fsspec.filesystem("http").ukey(f"{server.url}/x.jsonl"), "another key of prepared sets"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file.fs, "get_file", full)
    with pytest.raises(DataError, match="x.jsonl: the disk of .* is full; set TMPDIR"):
        texts(f"{server.url}/x.jsonl")


@pytest.mark.parametrize(("status", "tries"), [(401, 1), (403, 1), (404, 1), (503, TRIES)])
def test_only_what_may_pass_is_asked_for_again_and_the_end_is_one_sentence(server, status, tries, capfd):
    server.faults = [status] * 100
    with pytest.raises(DataError) as refused:
        list_files(Source(path=f"{server.url}/x.jsonl"))
    assert server.asked.count("HEAD") == tries
    assert capfd.readouterr().err.count("retrying") == tries - 1
    assert "503" in str(refused.value) if status == 503 else f"{server.url}/x.jsonl" in str(refused.value)


def hub_error(status: int) -> Exception:
    from huggingface_hub.errors import HfHubHTTPError

    class Response:
        status_code, headers, request = status, {}, None

    return HfHubHTTPError(f"{status} from the hub", response=Response())


@pytest.mark.parametrize(("error", "tries", "message"), [
    (ConnectionRefusedError("no network"), 1, "no network"), (hub_error(404), 1, "does not exist.*HTTP 404"),
    (hub_error(503), TRIES, "503 from the hub")], ids=["network", "404", "503"])
def test_a_possibly_mistyped_path_is_requested_once(monkeypatch, error, tries, message, capfd):
    requests = []

    def dataset_info(self, name, revision=None, timeout=None):
        requests.append(timeout)
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    with pytest.raises(DataError, match=f"my/text is not a local file or folder, and the request to the hub failed: .*{message}"):
        remote_data.hub_revision("my/text", "")
    assert requests == [remote.HUB_SECONDS] * tries
    assert capfd.readouterr().err.count("retrying") == tries - 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_the_hub_is_not_asked_again_where_it_refuses(status, monkeypatch):
    asked = []

    def snapshot_download(name: str, local_files_only: bool = False, **wanted) -> str:
        asked.append("cache" if local_files_only else "network")
        raise FileNotFoundError("not in the cache") if local_files_only else hub_error(status)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url, timeout: None)
    with pytest.raises(Exception, match=str(status)):
        hub_folder("someone/model", "config.json", lambda folder: True)
    assert asked == ["cache", "network"]


def test_a_dataset_that_brings_code_is_refused_and_the_code_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.sources.remote_data.hub_revision", lambda *named: "")
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(DataError, match="evil"):
        list(read_texts(Source(name=str(folder)), Reading()))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("error", "passes"), [
    (ConnectionRefusedError(), True), (TimeoutError(), True), (socket.gaierror(socket.EAI_AGAIN, "no network"), True),
    (socket.gaierror(socket.EAI_NONAME, "no such host"), False), (FileNotFoundError("x"), False), (ValueError(), False),
    (hub_error(500), True), (hub_error(408), True), (hub_error(400), False), (MemoryError(), False),
    (OSError(28, "full"), False), (ssl.SSLCertVerificationError("self-signed"), False)])
def test_what_may_pass(error, passes):
    assert is_transient(error) == passes
    wrapped, lost = FileNotFoundError("not in the cache, and not to be had"), ConnectionError("cannot connect")
    wrapped.__cause__ = lost.__cause__ = error
    assert is_transient(wrapped) == passes and is_transient(ConnectionError("cannot connect"))
    if isinstance(error, (socket.gaierror, ssl.SSLCertVerificationError)):
        assert is_transient(lost) == passes, "a host that does not exist, or whose certificate is refused, is not asked again"
