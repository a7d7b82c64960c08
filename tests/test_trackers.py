"""The metrics file, and the mirror in wandb: offline, online against a small server of our own, and without either."""

import gzip
import json
import logging
import math
import os
import resource
import shlex
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from normexp.fields import UserError
from normexp.trackers import Jsonl, Null, TrackerConfig, mirror, open_tracker, sync_command

LAYERS = [f"grad_norm/layer_{layer:02d}/{matrix}" for layer in range(3) for matrix in ("attn.q", "mlp.out")]


def row(step, **values):
    return {"step": step, "tokens": 512 * step, "train/loss": 3.0 / (1 + step), **values}


def rows(first, last):
    return [row(step) for step in range(first, last + 1)]


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


# The metrics file


def test_a_row_is_one_line_of_strict_json(tmp_path):
    with Jsonl(tmp_path / "metrics.jsonl", last_step=-1) as metrics:
        metrics.write([row(0), {"step": 1, "train/loss": math.nan, "grad_norm/total": -math.inf, "train/lr": 1e-3}])
        metrics.write([{"step": 2, "b": None, "a": math.inf, "nonfinite": ["b"]}])
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 0, "tokens": 0, "train/loss": 3.0}\n'
        '{"step": 1, "train/loss": null, "grad_norm/total": null, "train/lr": 0.001, '
        '"nonfinite": ["grad_norm/total", "train/loss"]}\n'
        '{"step": 2, "b": null, "a": null, "nonfinite": ["a", "b"]}\n'
    )


def test_rows_are_in_the_file_when_written_and_on_the_disk_when_synced(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), sync(handle)))
    path = tmp_path / "metrics.jsonl"
    with Jsonl(path, last_step=-1) as metrics:
        metrics.write(rows(0, 99))
        assert steps(path) == list(range(100))
        assert not synced
        metrics.sync()
        assert synced == [path.stat().st_size]


def test_what_lies_after_the_last_step_may_be_of_any_kind(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Jsonl(path, last_step=-1) as metrics:
        metrics.write(rows(0, 5))
    kept = path.read_bytes()
    path.write_bytes(kept + b"\0\0\n" + json.dumps(row(9)).encode() + b"\n")
    with Jsonl(path, last_step=5) as metrics:
        assert metrics.last_step == 5
    assert path.read_bytes() == kept


@pytest.mark.parametrize("torn", ["", '{"step": 8, "train/lo', '{"step": 8}', "\0\0\0\0\n"])
def test_after_a_resume_no_step_occurs_twice(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    with Jsonl(path, last_step=-1) as metrics:
        metrics.write(rows(0, 7))
    with path.open("a") as stream:
        stream.write(torn)
    with Jsonl(path, last_step=5) as metrics:
        assert metrics.last_step == 5
        metrics.write([row(6, again=1.0)])
        metrics.write(rows(7, 9))
        assert [kept["step"] for kept in metrics.history()] == [0, 1, 2, 3, 4, 5]
    assert steps(path) == list(range(10))
    assert json.loads(path.read_text().splitlines()[6])["again"] == 1.0


@pytest.mark.parametrize("torn", ['{"step": 8, "train/lo', '{"step": 8}'])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row(step)) + "\n" for step in range(8)) + torn)
    with Jsonl(path, last_step=20) as metrics:
        assert metrics.last_step == 7
        metrics.write(rows(8, 9))
    assert steps(path) == list(range(10))


@pytest.mark.parametrize(
    "damage", ['{"step": 2, "tr', "\0\0", '["step"]', '{"step": "2"}', '{"step": 1}', '{"step": 3}']
)
def test_a_damaged_middle_line_is_named(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([json.dumps(row(0)), json.dumps(row(1)), damage, json.dumps(row(3))]) + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl line 3: is damaged"):
        Jsonl(path, last_step=3)
    assert path.read_text().count("\n") == 4


def test_a_fresh_start_keeps_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("not json\n" + json.dumps(row(4)) + "\n")
    with Jsonl(path, last_step=-1) as metrics:
        assert list(metrics.history()) == []
        metrics.write(rows(0, 1))
    assert steps(path) == [0, 1]


def test_steps_must_rise(tmp_path):
    with Jsonl(tmp_path / "metrics.jsonl", last_step=-1) as metrics:
        metrics.write(rows(0, 3))
        with pytest.raises(ValueError, match="step 3 after step 3"):
            metrics.write([row(3)])
    assert steps(metrics.path) == [0, 1, 2, 3]


def test_a_full_disk_leaves_whole_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Jsonl(path, last_step=-1) as metrics:
        metrics.write(rows(0, 9))
        before = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 70, hard))
        try:
            with pytest.raises(OSError, match=r"cannot write metrics.*metrics\.jsonl"):
                metrics.write(rows(10, 19))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before
        metrics.write(rows(10, 11))
    assert steps(path) == list(range(12))


# The mirror


@pytest.fixture
def surroundings(tmp_path, monkeypatch):
    """No key, no settings and no mode of the one who runs the tests; no run of wandb is left over."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    import wandb

    wandb.teardown()
    yield monkeypatch
    wandb.teardown()


def config(mode="auto", init_timeout=20.0):
    return TrackerConfig(mode=mode, project="normexp", group=None, tags=("pilot",), init_timeout=init_timeout)


def opened(folder, *, history=(), run_id="rms-pre", **options):
    return open_tracker(
        config(**options),
        folder=folder,
        run_id=run_id,
        name=run_id,
        group="a sweep",
        tags=("rms", "pre"),
        resolved={"seed": 3, "model": {"depth": 6}, "id": run_id},
        history=history,
    )


def mirrored(folder, new, *, finish="finished", **options):
    tracker = opened(folder, **options)
    tracker.log(new)
    tracker.finish({"status": finish, "verdict": "trained", "val_loss": None, "cell": {"norm": "rms"}})
    return tracker


def local_runs(folder):
    return sorted(folder.glob("wandb/*run-2*"))


def records(run):
    """What wandb has stored of a local run, as its own tool reads it: a list of each type of record."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {}
    for record in map(json.loads, lines):
        found.setdefault(record["type"], []).append(record[record["type"]])
    return found


def mirrored_steps(run):
    return [record["step"]["num"] for record in records(run)["history"]]


def test_an_offline_run_holds_every_row_and_the_config(tmp_path, surroundings):
    new = [row(step, **dict.fromkeys(LAYERS, 0.5 * step)) for step in range(30)]
    new.append({"step": 30, "train/loss": None, "grad_norm/total": math.inf, "nonfinite": ["train/loss"]})
    mirrored(tmp_path, new)
    stored = records(*local_runs(tmp_path))
    items = [record["item"] for record in stored["history"]]
    own = [{path: value for path, value in item.items() if not path.startswith("_")} for item in items]
    assert own[:30] == new[:30]
    assert own[30] == {"step": 30, "train/loss": "NaN", "grad_norm/total": "NaN"}
    assert [item["_step"] for item in items] == list(range(31))
    started = stored["run"][0]
    assert (started["run_id"], started["run_group"], started["tags"]) == ("rms-pre", "a sweep", ["rms", "pre"])
    assert started["config"]["update"] | {"_wandb": 0} == {
        "seed": 3, "model": {"depth": 6}, "id": "rms-pre", "_wandb": 0,
    }  # fmt: skip
    axes = [(metric.get("name"), metric.get("glob_name"), metric.get("step_metric")) for metric in stored["metric"]]
    assert axes == [("step", None, None), ("tokens", None, None), (None, "*", "step")]
    summary = {name: value for record in stored["summary"] for name, value in record["update"].items()}
    assert summary["verdict"] == "trained"
    assert stored["exit"] == [{"exit_code": 0}]


def test_runs_one_after_another_keep_apart_from_each_other_and_from_an_outer_run(tmp_path, surroundings, capfd):
    import wandb

    outer = wandb.init(mode="offline", dir=str(tmp_path), id="outer", settings=wandb.Settings(silent=True))
    for seed in range(3):
        folder = tmp_path / f"seed {seed}"
        folder.mkdir()
        mirrored(folder, rows(0, seed), run_id=f"run-{seed}", mode="offline", finish="interrupted")
    assert wandb.run is outer
    outer.log({"x": 1.0})
    outer.finish()
    assert capfd.readouterr() == ("", "")
    for seed in range(3):
        (local,) = local_runs(tmp_path / f"seed {seed}")
        stored = records(local)
        assert [record["item"]["step"] for record in stored["history"]] == list(range(seed + 1))
        assert stored["run"][0]["run_id"] == stored["run"][0]["config"]["update"]["id"] == f"run-{seed}"
        assert stored["exit"] == [{"exit_code": 1}]


def test_an_offline_resume_replays_the_history_into_a_new_run(tmp_path, surroundings):
    mirrored(tmp_path, rows(0, 72), mode="offline")
    (broken,) = local_runs(tmp_path)
    mirrored(tmp_path, rows(51, 80), history=iter(rows(0, 50)), mode="offline")
    (local,) = local_runs(tmp_path)
    assert local != broken
    assert mirrored_steps(local) == list(range(81))


def test_each_row_is_one_log_call_and_none_is_repeated(tmp_path, surroundings):
    import wandb

    called = []
    surroundings.setattr(wandb.Run, "log", lambda run, data, step, commit: called.append((step, data, commit)))
    mirrored(tmp_path, rows(3, 8), history=rows(0, 5), mode="offline")
    assert called == [(step, row(step), True) for step in range(9)]


def test_disabled_does_not_even_import_wandb(tmp_path):
    program = """
import sys
from pathlib import Path
from normexp.trackers import *
def opened(mode):
    return open_tracker(TrackerConfig(mode, "p", None, (), 1.0), folder=Path("nowhere"), run_id="a", name="a",
                        group=None, tags=(), resolved={}, history=[])
for tracker in (opened("disabled"), opened("auto")):
    with tracker:
        tracker.log([{"step": 0}])
    assert type(tracker) is Null
assert "wandb" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "WANDB_MODE": "disabled"})


def test_the_mode_asked_for_wins_over_the_environment(tmp_path, surroundings):
    surroundings.setenv("WANDB_MODE", "disabled")
    assert isinstance(opened(tmp_path, mode="auto"), Null)
    mirrored(tmp_path, rows(0, 0), mode="offline")
    assert len(local_runs(tmp_path)) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"project": ""}, "tracker.project="),
        ({"project": "a/b"}, "tracker.project=a/b: must be 1 to 128 characters"),
        ({"tags": ("x" * 65,)}, "tracker.tags=x"),
        ({"tags": ("",)}, "tracker.tags="),
    ],
)
def test_what_wandb_would_refuse_is_refused_at_once(changed, message):
    values = {"mode": "auto", "project": "p", "group": None, "tags": (), "init_timeout": 1.0} | changed
    with pytest.raises(UserError, match=message):
        TrackerConfig(**values)


def test_an_unknown_mode_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "of")
    with pytest.raises(UserError, match="WANDB_MODE=of: must be one of online, offline, disabled"):
        config("auto")
    config("offline")


# wandb online: as much of its server as a run needs


class Server(ThreadingHTTPServer):
    """Keeps the history lines of each run by their offset, as wandb's server does, and counts what it is sent.

    `broken`: it answers 500 to everything.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs, self.received, self.broken = {}, 0, False
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *of):
        pass

    def steps(self, run):
        return [json.loads(line)["step"] for _, line in sorted(self.runs[run].items())]

    def answer(self, query, variables):
        run = variables.get("name")
        project = {"id": "p", "name": "normexp", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "b", "name": run, "displayName": run, "config": "{}", "project": project}
        if "query RunResumeStatus" in query:
            if run not in self.runs:
                return {"model": project | {"bucket": None}}
            lines = [line for _, line in sorted(self.runs[run].items())]
            state = {
                "historyLineCount": len(lines), "historyTail": json.dumps(lines[-1:]), "eventsTail": "[]",
                "eventsLineCount": 0, "logLineCount": 0, "summaryMetrics": "{}", "wandbConfig": '{"t": 1}', "tags": [],
            }  # fmt: skip
            return {"model": project | {"bucket": bucket | state}}
        if "mutation UpsertBucket" in query:
            self.runs.setdefault(run, {})
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "mutation CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.server.broken:
            return self.reply({}, 500)
        if self.path.endswith("/file_stream"):
            sent = (json.loads(body).get("files") or {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            lines = self.server.runs.setdefault(self.path.split("/")[-2], {})
            lines.update(enumerate(sent["content"], start=sent["offset"]))
            self.server.received += len(sent["content"])
            return self.reply({"limits": {}})
        asked = json.loads(body)
        return self.reply({"data": self.server.answer(asked.get("query", ""), asked.get("variables", {}))})

    def do_PUT(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.reply({})

    def reply(self, content, code=200):
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *of):
        pass


@pytest.fixture
def server(surroundings):
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        surroundings.setenv("WANDB_BASE_URL", server.url)
        surroundings.setenv("WANDB_API_KEY", "0" * 40)
        yield server
        server.shutdown()


def test_an_online_resume_sends_no_row_twice(tmp_path, server, surroundings):
    import wandb

    first = mirrored(tmp_path, rows(0, 72))
    assert server.steps("rms-pre") == list(range(73))
    assert first.url == f"{server.url}/me/normexp/runs/rms-pre"
    called, log = [], wandb.Run.log
    surroundings.setattr(wandb.Run, "log", lambda run, data, **of: (called.append(of["step"]), log(run, data, **of)))
    mirrored(tmp_path, rows(51, 90), history=rows(0, 50))
    assert called == list(range(73, 91))
    assert server.steps("rms-pre") == list(range(91))
    assert server.received == 91
    assert sync_command(tmp_path) is None


def test_the_sync_command_uploads_an_offline_run_and_its_continuation(tmp_path, server):
    def sync():
        command = [sys.executable if word == "wandb" else word for word in shlex.split(sync_command(tmp_path))]
        command = [sys.executable, "-m", "wandb", *command[command.index("sync") :]]
        subprocess.run(command, check=True, capture_output=True)

    mirrored(tmp_path, rows(0, 30), mode="offline")
    sync()
    assert server.steps("rms-pre") == list(range(31))
    assert sync_command(tmp_path) is None
    mirrored(tmp_path, rows(21, 40), history=rows(0, 20), mode="offline")
    assert len(local_runs(tmp_path)) == 2  # what has been uploaded is not ours to delete
    sync()
    assert server.steps("rms-pre") == list(range(41))


def test_an_offline_start_goes_on_online(tmp_path, server):
    mirrored(tmp_path, rows(0, 30), mode="offline")
    mirrored(tmp_path, rows(21, 40), history=rows(0, 20), mode="online")
    assert server.steps("rms-pre") == list(range(41))
    assert [local.name[:4] for local in local_runs(tmp_path)] == ["run-"]


def test_a_network_that_breaks_down_ends_the_run_in_a_bounded_time(tmp_path, server, surroundings, caplog):
    assert mirror.SETTINGS["finish_timeout"] == mirror.FINISH_TIMEOUT == 30
    surroundings.setattr(mirror, "FINISH_TIMEOUT", 1.0)
    surroundings.setitem(mirror.SETTINGS, "finish_timeout", 1.0)
    tracker = opened(tmp_path)
    while tracker.url is None:
        time.sleep(0.01)
    server.broken = True
    tracker.log(rows(0, 9))
    began = time.monotonic()
    tracker.finish({"status": "finished"})
    assert time.monotonic() - began < 5
    (warning,) = warnings(caplog)
    assert "not all rows were uploaded" in warning
    assert f"sync --include-online {local_runs(tmp_path)[0]}" in warning
    server.broken = False
    subprocess.run([sys.executable, "-m", *shlex.split(warning[warning.index("wandb sync") :])], check=True)
    assert server.steps("rms-pre") == list(range(10))


# No wandb at all


def test_without_a_network_the_run_is_offline_in_a_bounded_time(tmp_path, surroundings, caplog):
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        surroundings.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        surroundings.setenv("WANDB_API_KEY", "0" * 40)
        began = time.monotonic()
        mirrored(tmp_path, rows(0, 9), init_timeout=1.0)
        assert time.monotonic() - began < 10
    (local,) = local_runs(tmp_path)
    assert local.name.startswith("offline-run-")
    assert mirrored_steps(local) == list(range(10))
    (warning,) = warnings(caplog)
    assert "cannot go online" in warning


def test_online_without_a_key_asks_nobody(tmp_path, surroundings, caplog):
    mirrored(tmp_path, rows(0, 0), mode="online")
    (warning,) = warnings(caplog)
    assert "no API key" in warning
    assert local_runs(tmp_path)[0].name.startswith("offline-run-")


def test_a_key_that_cannot_be_one_is_named(tmp_path, surroundings, caplog):
    surroundings.setenv("WANDB_API_KEY", "abc")
    mirrored(tmp_path, rows(0, 0))
    (warning,) = warnings(caplog)
    assert "WANDB_API_KEY invalid" in warning
    assert local_runs(tmp_path)[0].name.startswith("offline-run-")


def test_a_key_in_netrc_is_found(tmp_path, server, surroundings):
    surroundings.delenv("WANDB_API_KEY")
    (tmp_path / "home").mkdir()
    host = server.url.removeprefix("http://")
    (tmp_path / "home" / "netrc").write_text(f"machine {host} login user password {'0' * 40}\n")
    mirrored(tmp_path, rows(0, 4))
    assert server.steps("rms-pre") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_fault_of_wandb_is_one_warning(tmp_path, surroundings, caplog, broken):
    import wandb

    def fail(*_, **__):
        raise RuntimeError("out of order")

    surroundings.setattr(
        *{"init": (wandb, "init"), "log": (wandb.Run, "log"), "finish": (wandb.Run, "finish")}[broken], fail
    )
    tracker = mirrored(tmp_path, rows(0, 9), mode="offline")
    tracker.log(rows(10, 19))
    tracker.finish({})
    (warning,) = warnings(caplog)
    assert warning == f"wandb: RuntimeError: out of order. All rows are in {tmp_path / 'metrics.jsonl'}"


def test_no_call_waits_for_a_wandb_that_hangs(tmp_path, surroundings, caplog):
    import wandb

    surroundings.setattr(mirror, "FINISH_TIMEOUT", -10.0)
    released = threading.Event()
    surroundings.setattr(wandb, "init", lambda **_: released.wait(60))
    began = time.monotonic()
    mirrored(tmp_path, rows(0, 9), mode="offline", init_timeout=0.2)
    assert time.monotonic() - began < 1
    assert warnings(caplog) == [
        f"wandb does not answer; the run is left to it. All rows are in {tmp_path / 'metrics.jsonl'}"
    ]
    released.set()


def test_a_run_that_raises_is_finished_as_failed(tmp_path, surroundings):
    def fails():
        with opened(tmp_path, mode="offline") as tracker:
            tracker.log(rows(0, 3))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    stored = records(*local_runs(tmp_path))
    assert len(stored["history"]) == 4
    assert stored["exit"] == [{"exit_code": 1}]


def warnings(caplog):
    """What the user reads. The logger of wandb writes to a file of its own."""
    ours = [record for record in caplog.records if record.name.startswith("normexp")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]
