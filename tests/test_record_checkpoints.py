"""Where the recorder finds a checkpoint: a folder, the Hugging Face cache, and a hub only when it is asked to."""

import hashlib
import http.server
import json
import shutil
import socket
import threading
from pathlib import Path
from typing import Any, ClassVar

import commands
import pytest
import recorded

from perfmodel.errors import PerfModelError
from perfmodel.record import record_trace
from perfmodel.record.checkpoints import find_checkpoint

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of three layers, with one token a byte."""
    return recorded.save_model(recorded.make_model(), tmp_path_factory.mktemp("record") / "toy-moe")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two prompts."""
    file = tmp_path / "prompts.txt"
    file.write_text("hello\nonce upon a time\n", encoding="utf-8")
    return file


@pytest.fixture
def cache(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache that holds the small model as ``someone/toy``."""
    import huggingface_hub

    folder = tmp_path / "hub" / "models--someone--toy"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc123", encoding="utf-8")
    shutil.copytree(checkpoint, folder / "snapshots" / "abc123")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder.parent))
    return folder


def test_ids_are_looked_up_in_the_cache_and_nowhere_else(
    cache: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was tried")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    trace = record_trace("someone/toy", ["hello"], max_new_tokens=1)
    assert (trace.metadata["model"], trace.metadata["revision"]) == ("someone/toy", "abc123")
    found = find_checkpoint(cache / "snapshots" / "abc123")
    assert (found.name, found.revision) == ("someone/toy", "abc123")
    base = ("trace", "record", "--prompts", prompts, "--max-new-tokens", 1, "-o", tmp_path / "o.npz", "--model")
    commands.check_refusal(
        commands.run(*base, "someone/else"), "someone/else: no such folder, and not whole in the local cache"
    )
    for name in ("../toy", "a/b/c", "some one", "\0", "-x/y", "a--b", "", "x" * 300):
        with pytest.raises(PerfModelError, match=r"no such folder, and no id such as owner/name|model: found ''"):
            find_checkpoint(name)
    with pytest.raises(PerfModelError, match=r"prompts\.txt: is no folder"):
        find_checkpoint(prompts)
    with pytest.raises(PerfModelError, match=r"model: found 3, allowed: a checkpoint's folder, or its id"):
        find_checkpoint(3)  # type: ignore[arg-type]


def test_only_a_download_goes_online_and_fetches_no_code(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def fetch(name: str, *, local_files_only: bool, allow_patterns: list[str]) -> str:
        asked.append((name, local_files_only, huggingface_hub.constants.HF_HUB_OFFLINE, allow_patterns))
        if name == "someone/broken":
            raise OSError("no route\nto host")
        return str(cache / "snapshots" / "abc123")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("perfmodel.record.checkpoints.TOLD_OFFLINE", False)
    assert find_checkpoint("someone/toy", download=True).name == "someone/toy"
    with pytest.raises(PerfModelError, match=r"someone/broken: cannot be downloaded \(no route to host\)"):
        find_checkpoint("someone/broken", download=True)
    find_checkpoint("someone/toy")
    assert [one[:3] for one in asked] == [
        ("someone/toy", False, False),
        ("someone/broken", False, False),
        ("someone/toy", True, True),
    ]
    patterns = asked[0][3]
    names = (
        "model-00001-of-00002.safetensors",
        "evil.py",
        "pytorch_model.bin",
        "consolidated.00.pth",
        "tokenizer.json",
    )
    assert [name for name in names if any(Path(name).match(one) for one in patterns)] == [names[0], names[4]]
    monkeypatch.setattr("perfmodel.record.checkpoints.TOLD_OFFLINE", True)
    with pytest.raises(PerfModelError, match="download: found HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE set"):
        find_checkpoint("someone/toy", download=True)
    assert len(asked) == 3


COMMIT = "c0ffee" * 6 + "1234"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face Hub as a download needs: one model, ``someone/new``."""

    folder: Path
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        self.asked.append(name)
        sizes = {file.name: file.stat().st_size for file in self.folder.iterdir()} | {"evil.py": 9, "old.bin": 9}
        if "/tree/" in path:
            found = json.dumps([{"type": "file", "path": one, "size": size, "oid": one} for one, size in sizes.items()])
        elif path.startswith("/api/models/someone/new"):
            files = [{"rfilename": one} for one in sizes]
            found = json.dumps({"id": "someone/new", "sha": COMMIT, "siblings": files})
        elif path.startswith("/someone/new/resolve/") and (self.folder / name).is_file():
            found = (self.folder / name).read_bytes()
        else:
            self.send_error(404)
            return
        found = found.encode() if isinstance(found, str) else found
        self.send_response(200)
        self.send_header("Content-Length", str(len(found)))
        self.send_header("ETag", f'"{hashlib.sha1(found).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(found)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_download_from_a_hub(
    checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(Hub, "folder", checkpoint, raising=False)
    monkeypatch.setattr("perfmodel.record.checkpoints.TOLD_OFFLINE", False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        base = ("trace", "record", "--model", "someone/new", "--prompts", prompts, "--max-new-tokens", 1, "--json")
        commands.check_refusal(commands.run(*base, "-o", tmp_path / "a.npz"), "someone/new: no such folder")
        assert not Hub.asked
        found = commands.run(*base, "-o", tmp_path / "a.npz", "--download").document
        assert (found["metadata"]["model"], found["metadata"]["revision"]) == ("someone/new", COMMIT)
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(Hub.asked)
        assert not {"evil.py", "old.bin"} & set(Hub.asked)
        count = len(Hub.asked)
        assert commands.run(*base, "-o", tmp_path / "b.npz").document["metadata"] == found["metadata"]
        assert len(Hub.asked) == count
    finally:
        server.shutdown()
        server.server_close()


def test_code_in_a_checkpoint_is_never_run(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own-code"
    shutil.copytree(checkpoint, folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n", encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = ("--model", folder, "--prompts", prompts, "--max-new-tokens", 1, "-o", tmp_path / "o.npz")
    commands.check_refusal(commands.run("trace", "record", *options), "own-code")
    assert not (tmp_path / "ran").exists()
