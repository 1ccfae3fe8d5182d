"""scripts/export.py: a folder to share, and an upload to the hub, here to a server on this machine."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copytree

import pytest
import torch
from commands import python

from checkpoint.store import OPTIMIZER, STATE, verify

TOKEN = "hf_right"


class Hub(BaseHTTPRequestHandler):
    """The requests of the hub's client for an upload, as its API answers them; files arrive with the commit."""

    files: dict = {}
    created: list = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            return self.answer({"url": f"{self.server.url}/me/first", "id": "me/first"})
        if "/preupload/" in self.path:
            return self.answer({"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in json.loads(body)["files"]]})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer({"commitUrl": f"{self.server.url}/me/first/commit/abc", "commitOid": "abc", "success": True})
        return self.answer({})

    def do_GET(self) -> None:
        self.answer({"id": "me/first", "sha": "abc", "siblings": []})

    def answer(self, content: dict, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def hub(monkeypatch):
    Hub.files, Hub.created = {}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    yield server
    server.shutdown()
    server.server_close()


def export(*flags, code: int = 0) -> str:
    """Run it in a process, because the hub's client reads HF_ENDPOINT when it is imported."""
    done = python("scripts/export.py", *flags, code=code)
    return done.stdout + done.stderr


def visibility(request: dict) -> str:
    """As this or an older version of the hub's client asks for it."""
    return request.get("visibility") or ("private" if request["private"] else "public")


def without_training(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name not in (STATE, OPTIMIZER, "MANIFEST.json")}


def test_hf_is_the_model_without_what_resuming_needs(whole, tmp_path, transformers):
    output = export(whole.folder, "--to", "hf", "--output", tmp_path / "made")
    source = max((whole.folder / "checkpoints").glob("step-*"))
    assert without_training(tmp_path / "made") == without_training(source)
    assert verify(tmp_path / "made")["files"].keys() == without_training(source).keys() - {"README.md"} and "Exported" in output
    actual, reference = (transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "made"))
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(actual(tokens).logits, reference(tokens).logits)
    assert "already exists; choose a new folder" in export(whole.folder, "--to", "hf", "--output", tmp_path / "made", code=5)


def test_the_hub_gets_the_same_files_in_a_private_repository(whole, hub, tmp_path):
    output = export(whole.folder, "--to", "hub", "--repo", "me/first")
    source = max((whole.folder / "checkpoints").glob("step-*"))
    assert Hub.files == without_training(source) and "Uploaded: " in output and "/commit/abc" in output
    assert visibility(Hub.created[0]) == "private" and Hub.created[0]["name"] == "first"
    public = ("--to", "hub", "--repo", "me/first", "--public")
    assert "names no license, so the model stays private" in export(whole.folder, *public, code=5) and len(Hub.created) == 1
    copy = copytree(source, tmp_path / source.name)
    (copy / "README.md").write_text((copy / "README.md").read_text().replace("license: unknown", "license: apache-2.0"))
    export(copy, *public)
    assert visibility(Hub.created[1]) == "public" and b"license: apache-2.0" in Hub.files["README.md"]
    (copy / "README.md").unlink()
    assert "has no model card" in export(copy, *public, code=5)


def test_a_dry_run_lists_what_would_be_uploaded_and_needs_no_token(whole, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    output = export(whole.folder, "--to", "hub", "me/first", "--dry-run")
    source = max((whole.folder / "checkpoints").glob("step-*"))
    names = sorted(without_training(source))
    title, *lines, last = [line for line in output.splitlines() if not line.startswith("Using ")]
    assert [line.split()[0] for line in lines] == names and f"{len(names)} files" in title and "to me/first (private" in title
    assert all(f"{(source / name).stat().st_size:,} bytes" in line for name, line in zip(names, lines))
    assert last.endswith("--to hub me/first") and Hub.files == {} and Hub.created == []
    assert "names no license" in export(whole.folder, "--to", "hub", "me/first", "--dry-run", "--public", code=5)
