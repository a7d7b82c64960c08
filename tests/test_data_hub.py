"""The hub, as far as it can be tested without one: whether it answers, and a server on this machine that speaks as it
does about one dataset."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from normexp.data import hub
from normexp.fields import UserError
from tests.test_data_records import HF, open_hf

STORIES = [f"story {number}\nand its end, {number**2}" for number in range(300)]
COMMIT, FILE = "a" * 40, "data/train-00000-of-00001.parquet"


def sha256(documents: list[str]) -> str:
    return hashlib.sha256(b"records\x1e" + "\x1e".join(documents).encode()).hexdigest()


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    """Each test asks anew, and of no real hub."""
    hub._online.cache_clear()
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    yield
    hub._online.cache_clear()


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home")
    return tmp_path / "home"


# Whether it answers


def test_a_hub_that_does_not_answer_is_refused_at_once(tmp_path, home, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "answers", lambda: bool(asked.append(None)))
    before = time.monotonic()
    for name in ("owner/one", "owner/two"):
        line = (
            rf"^data\.name={name}: the hub, http.*, does not answer, and `datasets` has no copy of it; connect, or give"
        )
        with pytest.raises(UserError, match=line):
            open_hf(name, tmp_path / "cache")
    assert time.monotonic() - before < 5  # `datasets` alone takes 24 s
    assert len(asked) == 1
    assert not (tmp_path / "cache").exists()


def test_the_hub_is_not_asked_where_the_user_is_offline_or_the_files_are_local(tmp_path, home, monkeypatch):
    monkeypatch.setattr(hub, "answers", lambda: pytest.fail("asked"))
    (tmp_path / "a.jsonl").write_text('{"text": "some words of text"}\n' * 3)
    open_hf(tmp_path / "a.jsonl", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"^data\.name=owner/one: HF_HUB_OFFLINE is set, and `datasets` has no copy"):
        open_hf("owner/one", tmp_path / "cache")


def test_a_silent_hub_is_waited_for_only_so_long(monkeypatch):
    monkeypatch.setattr(hub, "PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        before = time.monotonic()
        assert not hub.answers()
        assert time.monotonic() - before < 2
    monkeypatch.setattr(hub, "urlopen", lambda *_, **__: time.sleep(10))  # as of a name server that is silent
    before = time.monotonic()
    assert not hub.answers()
    assert time.monotonic() - before < 2
    monkeypatch.setenv("HF_ENDPOINT", "no address")
    assert not hub.answers()


# A server that speaks as the hub does


class FakeHub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    content = b""  # of the one file that it has

    def log_message(self, *_):
        pass

    def do_GET(self):
        path, start, stop = self.path.partition("?")[0], 0, len(self.content)
        if path == f"/datasets/owner/tiny/resolve/{COMMIT}/{FILE}":
            asked = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, stop = (int(asked[1]), int(asked[2]) + 1) if asked else (start, stop)
            self._say(206 if asked else 200, self.content[start:stop], start, ETag='"1"')
        elif re.fullmatch(rf"/api/datasets/owner/tiny(/revision/({COMMIT}|main))?", path):
            about = {"id": "owner/tiny", "sha": COMMIT, "tags": [], "siblings": [{"rfilename": FILE}]}
            self._say(200, json.dumps(about).encode())
        elif re.fullmatch(rf"/api/datasets/owner/tiny/tree/{COMMIT}(/data)?", path):
            folder = [] if path.endswith("/data") else [{"type": "directory", "oid": "d" * 40, "path": "data"}]
            file = {"type": "file", "oid": "e" * 40, "size": len(self.content), "path": FILE}
            self._say(200, json.dumps([*folder, file]).encode())
        elif path == "/":
            self._say(200, b"")
        else:
            known = "EntryNotFound" if "/resolve/" in path else "RevisionNotFound" if "tiny" in path else "RepoNotFound"
            self._say(404, b"", **{"X-Error-Code": known if "tiny" in path else "RepoNotFound"})

    do_HEAD = do_GET

    def _say(self, code: int, body: bytes, start: int = 0, **headers: str) -> None:
        self.send_response(code)
        span = f"bytes {start}-{start + len(body) - 1}/{len(self.content)}"
        for name, value in {
            "Content-Length": len(body),
            "Content-Range": span,
            "X-Repo-Commit": COMMIT,
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def session(folder: Path) -> None:
    """Prints what requests of the fake hub give, the hash or the refusal, and what they give when it is gone. In a
    process of its own, since the libraries take the address of the hub at their import."""
    pq.write_table(pa.table({"text": STORIES}), folder / "table.parquet")
    FakeHub.content = (folder / "table.parquet").read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    _show(folder, {"revision": COMMIT})
    _show(folder, {"streaming": False, "documents": 200})
    _show(folder, {"name": "owner/missing"})
    _show(folder, {"revision": "b" * 40})
    _show(folder, {"split": "tset"})
    server.shutdown()
    server.server_close()
    hub._online.cache_clear()
    _show(folder, {"documents": 200, "split": "train", "revision": COMMIT})  # from the cache of `datasets`
    _show(folder, {"revision": "b" * 40})
    _show(folder, {"name": "owner/missing"})
    hub.documents = None  # type: ignore[assignment]
    _show(folder, {"revision": COMMIT})  # from our own


def _show(folder: Path, request: dict) -> None:
    try:
        print(open_hf(request.pop("name", "owner/tiny"), folder / "cache", **request).sha256)
    except UserError as error:
        print(error)


def test_a_dataset_of_a_hub_is_read_once(tmp_path):
    code = f"from pathlib import Path; from tests.test_data_hub import session; session(Path({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")  # the libraries say nothing of their own
    here = r"data\.name=owner/tiny"
    expected = [
        sha256(STORIES),
        sha256(STORIES[:200]),
        r"data\.name=owner/missing: cannot be read by `datasets` \(DatasetNotFoundError: .*",
        rf"data\.revision=b{{40}}: does not fit {here} \(Revision .*",
        rf"data\.split=tset: does not fit {here} \(Bad split: .*",
        sha256(STORIES[:200]),
        rf"data\.revision=b{{40}}: the hub, http.*, does not answer, and the copy at hand is {COMMIT}; connect, .*",
        r"data\.name=owner/missing: the hub, http.*, does not answer, and `datasets` has no copy of it; connect, .*",
        sha256(STORIES),
    ]
    for line, pattern in zip(done.stdout.splitlines(), expected, strict=True):
        assert re.fullmatch(pattern, line)


def test_every_other_request_is_another_text(tmp_path, monkeypatch):
    """The text here tells what was wanted; streaming changes how it comes, not what."""
    asked = []

    def documents(wanted, streaming):
        asked.append(wanted)
        return [f"{field} is {value}" for field, value in wanted._asdict().items()]

    monkeypatch.setattr(hub, "documents", documents)
    plain = {field: HF[field] for field in hub.Wanted._fields if field != "name"}
    changes = {"config": "c", "revision": "r", "split": "test", "column": "body", "documents": 5}
    requests = [plain, *(plain | {field: value} for field, value in changes.items())]
    assert len(requests) == len(hub.Wanted._fields)
    for request in requests * 2:
        for streaming in (True, False):
            source = open_hf("owner/tiny", tmp_path / "cache", streaming=streaming, **request)
            wanted = {"name": "owner/tiny", **request}
            assert source.sha256 == sha256([f"{field} is {value}" for field, value in wanted.items()])
    assert len(asked) == len(requests)


def test_a_download_that_breaks_off_leaves_no_text(tmp_path, monkeypatch):
    def broken(wanted, streaming):
        yield "a first document"
        raise UserError("data.name=owner/tiny: broke off")

    monkeypatch.setattr(hub, "documents", broken)
    with pytest.raises(UserError, match="broke off"):
        open_hf("owner/tiny", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_column_that_is_not_all_text_is_refused(tmp_path):
    """`datasets` makes JSON of it, so that every document would come in quotation marks."""
    lines = [json.dumps({"text": f"record {number} of a story"}) for number in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"text": 5}']) + "\n")
    with pytest.raises(UserError, match=r"column text is arrow\.json: not all of it is text"):
        open_hf(str(tmp_path / "a.jsonl"), tmp_path / "cache")


def test_a_folder_of_two_kinds_is_refused(tmp_path):
    (tmp_path / "mixed").mkdir()
    for name in ("a.jsonl", "b.parquet"):
        (tmp_path / "mixed" / name).write_text("")
    with pytest.raises(UserError, match="holds both parquet and jsonl"):
        open_hf(str(tmp_path / "mixed"), tmp_path / "cache")
