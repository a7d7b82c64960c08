"""The cache of tokens and of the hub's text: written once, whole, checked at every use."""

import errno
import multiprocessing
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from normexp.data import cache, corpora, hub
from normexp.fields import UserError
from tests.test_data import digest, open_text, same
from tests.test_data_records import open_hf
from tests.test_data_text import PROSE


def test_cache_is_mapped_and_gives_the_same_batches(tmp_path):
    (tmp_path / "corpus.txt").write_text(PROSE)
    first, second = (open_text(tmp_path / "corpus.txt", tmp_path / "cache") for _ in range(2))
    assert same(first.batch(0, 1, 8), second.batch(0, 1, 8))
    assert first.unigram_entropy == second.unigram_entropy
    base = second._train.ids
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


def test_second_use_neither_reads_nor_writes(tmp_path, monkeypatch):
    (tmp_path / "corpus.txt").write_text(PROSE)
    open_text(tmp_path / "corpus.txt", tmp_path / "cache")
    before = stamps(tmp_path / "cache")
    monkeypatch.setattr(corpora, "_read", lambda *_: pytest.fail("the text was read again"))
    open_text(tmp_path / "corpus.txt", tmp_path / "cache", shape="padded", validation=0.4, context=4)
    assert stamps(tmp_path / "cache") == before
    assert len(before) == 4  # one folder with two files and their sums


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_tokenizers_do_not_share_an_entry(tmp_path):
    (tmp_path / "corpus.txt").write_text(PROSE)
    for tokenizer, size in (("characters", len(set(PROSE))), ("bytes", 256)):
        assert open_text(tmp_path / "corpus.txt", tmp_path / "cache", tokenizer=tokenizer).vocab_size == size


def test_of_two_writers_the_second_keeps_what_the_first_wrote(tmp_path, monkeypatch):
    """The other one writes the whole entry while this one is in the middle of its own."""
    (tmp_path / "corpus.txt").write_text(PROSE)
    write, during = cache._write, []

    def interleaved(path, content):
        if not during:
            during.append(None)
            open_text(tmp_path / "corpus.txt", tmp_path / "cache")
            during.append(stamps(entry(tmp_path / "cache")))
        write(path, content)

    monkeypatch.setattr(cache, "_write", interleaved)
    assert open_text(tmp_path / "corpus.txt", tmp_path / "cache").vocab_size == len(set(PROSE))
    assert stamps(entry(tmp_path / "cache")) == during[1]
    assert list((tmp_path / "cache").iterdir()) == [entry(tmp_path / "cache")]


def entry(cache: Path) -> Path:
    (only,) = (path for path in cache.iterdir() if not path.name.startswith("."))
    return only


def test_processes_that_start_at_once_agree(tmp_path):
    (tmp_path / "corpus.txt").write_text(PROSE * 20_000)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=open_at_once, args=(tmp_path, barrier, results), daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert len(set(found)) == 1
    assert not found[0].startswith("error")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [entry(tmp_path / "cache").name]


def open_at_once(folder, barrier, results) -> None:
    barrier.wait(timeout=60)
    try:
        results.put(digest(open_text(folder / "corpus.txt", folder / "cache")))
    except BaseException as error:
        results.put(f"error: {error!r}")


def test_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "corpus.txt").write_text(PROSE)

    def full(path, content):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_write", full)
        with pytest.raises(UserError, match=r"results: cannot write the cache .* \(No space left on device\)"):
            open_text(tmp_path / "corpus.txt", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert open_text(tmp_path / "corpus.txt", tmp_path / "cache").vocab_size == len(set(PROSE))


def shortened(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [shortened, flipped, Path.unlink])
@pytest.mark.parametrize("name", ["ids.npy", "tokens.json", "SHA256SUMS"])
def test_a_damaged_cache_of_tokens_is_named(tmp_path, damage, name):
    (tmp_path / "corpus.txt").write_text(PROSE)
    open_text(tmp_path / "corpus.txt", tmp_path / "cache")
    damage(entry(tmp_path / "cache") / name)
    with pytest.raises(UserError, match=r"^results: the cache .*/characters-.* is damaged; delete it and repeat"):
        open_text(tmp_path / "corpus.txt", tmp_path / "cache")


@pytest.mark.parametrize("damage", [shortened, flipped])
def test_a_damaged_text_of_the_hub_is_no_other_corpus(tmp_path, damage, monkeypatch):
    monkeypatch.setattr(hub, "local", lambda name: None)
    monkeypatch.setattr(hub, "documents", lambda *_: iter(["some words of text"] * 30))
    open_hf("owner/tiny", tmp_path / "cache")
    (kept,) = (tmp_path / "cache").glob("hub-*")
    damage(kept / "text")
    with pytest.raises(UserError, match=r"^results: the cache .*/hub-.* is damaged; delete it and repeat"):
        open_hf("owner/tiny", tmp_path / "cache")


def test_a_file_that_the_sums_do_not_name_is_damage(tmp_path):
    cache.store(tmp_path / "entry", {"one": lambda stream: stream.write(b"a"), "two": lambda stream: None})
    sums = (tmp_path / "entry" / "SHA256SUMS").read_text()
    (tmp_path / "entry" / "SHA256SUMS").write_text(sums.splitlines(keepends=True)[0])
    with pytest.raises(UserError, match="is damaged; delete it"):
        cache.check(tmp_path / "entry")


def test_the_sums_are_those_that_sha256sum_checks(tmp_path):
    cache.store(tmp_path / "entry", {"one": lambda stream: stream.write(b"a"), "two": lambda stream: None})
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "entry", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "one: OK\ntwo: OK\n")


def killed_while_it_writes(folder: Path) -> None:
    cache.store(folder / "entry", {"half": lambda stream: os._exit(9)})


def test_what_a_killed_writer_left_is_cleared_and_what_a_live_one_writes_is_not(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=killed_while_it_writes, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 9
    (left,) = tmp_path.iterdir()
    cache._clear(tmp_path)
    assert left.exists()  # it might be about to be locked
    os.utime(left, (0, 0))
    (tmp_path / ".writing-without-a-lock").mkdir()
    cache._clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".writing-without-a-lock"]
    os.utime(tmp_path / ".writing-without-a-lock", (0, 0))
    seen = []

    def write(stream):
        seen.append(set(tmp_path.iterdir()))
        if len(seen) == 1:
            cache.store(tmp_path / "other", {"text": lambda stream: None})
            seen.append(set(tmp_path.iterdir()))

    cache.store(tmp_path / "entry", {"text": write})
    (writing,) = seen[0]
    assert seen[1] == {writing, tmp_path / "other"}
    assert set(tmp_path.iterdir()) == {tmp_path / "entry", tmp_path / "other"}
