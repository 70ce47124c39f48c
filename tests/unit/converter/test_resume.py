"""Interrupted, repeated and competing conversions, and output directories in every state."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dsv4.errors import CheckpointError, ConfigurationError, Dsv4Error
from dsv4_converter import ConversionCancelledError, convert, output_files

from tests.unit.converter.checkpoints import make_source, variant
from tests.unit.converter.test_convert import RUN_COMMAND, read_tree

MARKER = ".pypto-w8a8-conversion.json"
LAYOUT = variant(ratios=(0, 4), experts=8, shards=4)
FIRST, SECOND = "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("pristine") / "source", LAYOUT)


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "source"))


@pytest.fixture
def clean(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """An undisturbed conversion."""
    convert(source, tmp_path / "clean")
    return read_tree(tmp_path / "clean")


def convert_partly(source: Path, out: Path, shards: int = 2) -> None:
    """Stop after some shards."""
    from threading import Event

    stop, seen = Event(), []

    def watch(event: Any) -> None:
        if event.kind == "file":
            seen.append(event.message)
            if len(seen) == shards:
                stop.set()

    with pytest.raises(ConversionCancelledError):
        convert(source, out, progress=watch, cancelled=stop)
    assert not list(out.glob(".*.tmp"))
    assert not list(out.glob("*.lock"))


# Every call that changes the disk; a run is killed at the n-th of them.
DISK_CALLS = ("pwrite", "fsync", "replace", "ftruncate", "mkdir")


def run_and_kill(source: Path, out: Path, moment: int, resume: bool) -> tuple[bool, int]:
    """Convert in a child that kills itself at the n-th disk call, half of a write done.

    Returns:
        whether the child was killed, and how many disk calls it made if not.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        calls = 0

        def counted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == moment:
                    if name == "pwrite":
                        view = memoryview(arguments[1])
                        original(arguments[0], bytes(view[: len(view) // 2]), arguments[2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **named)

            return call

        status = 1
        try:
            for name in DISK_CALLS:
                setattr(os, name, counted(getattr(os, name), name))
            # Half of a direct write would not be aligned.
            sys.modules["dsv4_converter.shard_writer"]._open_direct = lambda _: -1  # type: ignore[attr-defined]
            convert(source, out, resume=resume)
            os.write(write_end, str(calls).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read_end) as stream:
        text = stream.read()
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0
    return killed, int(text or 0)


def test_killed_at_fifty_moments_then_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a killed process wrote survives it without fsync; only a dying machine needs it.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    small = variant(
        hidden=64, intermediate=32, q_lora=32, vocab=64, experts=6, ratios=(4,), hash_layers=0, shards=2, mtp=0
    )
    source = make_source(tmp_path / "source", small)
    convert(source, tmp_path / "clean")
    clean = read_tree(tmp_path / "clean")
    killed, total = run_and_kill(source, tmp_path / "count", moment=0, resume=False)
    assert not killed
    assert read_tree(tmp_path / "count") == clean
    chosen = random.Random(5)
    moments = sorted({1, 2, total - 1, total} | set(chosen.sample(range(1, total), min(48, total - 1))))
    assert len(moments) >= min(48, total - 1)
    for moment in moments:
        out = tmp_path / f"killed-{moment}"
        killed, _ = run_and_kill(source, out, moment, resume=False)
        assert killed
        if moment % 4 == 0:
            # A second kill, in the middle of the resumed run.
            run_and_kill(source, out, chosen.randrange(1, total), resume=True)
        convert(source, out, resume=True)
        assert read_tree(out) == clean, moment
        shutil.rmtree(out)


def test_resume_keeps_finished_shards(source: Path, clean: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_partly(source, out)
    before = (out / FIRST).stat()
    summary = convert(source, out, resume=True)
    assert FIRST in summary.reused
    assert summary.converted
    assert (out / FIRST).stat().st_mtime_ns == before.st_mtime_ns
    assert read_tree(out) == clean


def flip_bit(path: Path, *, keep_times: bool = False) -> None:
    status = path.stat()
    with path.open("r+b") as stream:
        stream.seek(-5, os.SEEK_END)
        value = stream.read(1)[0] ^ 1
        stream.seek(-5, os.SEEK_END)
        stream.write(bytes([value]))
    if keep_times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def zero_payload(path: Path) -> None:
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes(raw[:begin] + bytes(len(raw) - begin))


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(
    "damage",
    [flip_bit, lambda path: flip_bit(path, keep_times=True), truncate, zero_payload, Path.unlink],
    ids=["bit flip", "bit flip with old times", "truncated", "zeros", "removed"],
)
def test_damaged_shard_is_converted_again(
    source: Path, clean: dict[str, bytes], tmp_path: Path, complete: bool, damage: Callable[[Path], None]
) -> None:
    out = tmp_path / "out"
    if complete:
        convert(source, out)
        time.sleep(0.02)  # the kernel's clock for file times is coarse
    else:
        convert_partly(source, out)
    damage(out / FIRST)
    summary = convert(source, out, resume=True)
    assert FIRST in summary.converted
    assert read_tree(out) == clean


def test_complete_output_is_recognised_without_reading_it(
    source: Path, clean: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert(source, out)
    time.sleep(0.02)
    marker_time = (out / MARKER).stat().st_mtime_ns
    read: list[str] = []
    module = sys.modules["dsv4_converter.convert"]
    original = module.digest_output

    def watched(file: Any, *rest: Any) -> Any:
        read.append(file.path.name)
        return original(file, *rest)

    monkeypatch.setattr(module, "digest_output", watched)
    untouched = [path.name for path in out.glob("*.safetensors") if path.stat().st_ctime_ns < marker_time]
    assert convert(source, out, resume=True).converted == []
    assert not set(read) & set(untouched)
    assert (out / MARKER).stat().st_mtime_ns == marker_time
    convert(source, out, resume=True, verify=True)
    assert set(read) >= set(untouched)
    assert read_tree(out) == clean


@pytest.mark.parametrize("complete", [False, True])
def test_changed_source_is_refused(source: Path, tmp_path: Path, complete: bool) -> None:
    out = tmp_path / "out"
    if complete:
        convert(source, out)
        time.sleep(0.02)
    else:
        convert_partly(source, out)
    flip_bit(source / FIRST, keep_times=True)
    with pytest.raises(CheckpointError, match=f"{FIRST}: changed since it was converted"):
        convert(source, out, resume=True)


def test_copied_source_is_accepted(source: Path, clean: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_partly(source, out)
    copy = shutil.copytree(source, tmp_path / "copy")
    summary = convert(copy, out, resume=True)
    assert FIRST in summary.reused
    tree = read_tree(out)
    marker = json.loads(tree.pop(MARKER))
    assert marker == json.loads(clean.pop(MARKER)) | {"input_dir": str(copy)}
    assert tree == clean


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_changed_description_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    convert_partly(source, tmp_path / "out")
    (source / name).write_text((source / name).read_text() + "\n")
    with pytest.raises(CheckpointError, match="of the source differs"):
        convert(source, tmp_path / "out", resume=True)


def test_other_rounding_is_refused(source: Path, tmp_path: Path) -> None:
    convert_partly(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="rounding differs"):
        convert(source, tmp_path / "out", resume=True, rounding="rtn")


@pytest.mark.parametrize(
    "content", [None, b"", b'{"format": ', b"[]", b'{"format": "other"}', b'{"format": "pypto-deepseek-v4-w8a8-v2"}',
                b'{"format": "pypto-deepseek-v4-w8a8-v2", "input_dir": "", "source_config_sha256": "", '
                b'"source_index_sha256": "", "shards": {"a": 1}}'],
    ids=["deleted", "empty", "truncated", "list", "other format", "no fields", "broken record"],
)  # fmt: skip
def test_broken_marker_is_refused(source: Path, tmp_path: Path, content: bytes | None) -> None:
    out = tmp_path / "out"
    convert_partly(source, out)
    if content is None:
        (out / MARKER).unlink()
    else:
        (out / MARKER).write_bytes(content)
    before = read_tree(out)
    with pytest.raises(CheckpointError, match=MARKER):
        convert(source, out, resume=True)
    assert read_tree(out) == before


def test_existing_directory_needs_resume(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ConfigurationError, match="--resume"):
        convert(source, out)
    assert not list(out.iterdir())
    assert convert(source, out, resume=True).converted


@pytest.mark.parametrize("resume", [False, True])
def test_regular_file_as_output(source: Path, tmp_path: Path, resume: bool) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigurationError, match="not a directory"):
        convert(source, tmp_path / "out", resume=resume)
    assert (tmp_path / "out").read_text() == "mine"


def test_nested_directories_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    before = sorted(source.iterdir())
    for out in (source, tmp_path / "link", source / "out", tmp_path / "link" / "a" / "b", tmp_path):
        for resume in (False, True):
            with pytest.raises(ConfigurationError, match="director"):
                convert(source, out, resume=resume)
    assert sorted(source.iterdir()) == before


def test_leftovers_of_a_killed_run_are_removed(source: Path, clean: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_partly(source, out)
    for name in (f".{SECOND}.tmp", ".tokenizer.json.tmp", f".{MARKER}.tmp", output_files.LOCK_NAME):
        (out / name).write_text("left")
    convert(source, out, resume=True)
    assert read_tree(out) == clean


def test_second_converter_is_refused(source: Path, clean: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused = []

    def compete(event: Any) -> None:
        if event.kind == "file":
            with pytest.raises(CheckpointError, match=f"locked by process {os.getpid()}"):
                convert(source, out, resume=True)
            refused.append(event.message)

    convert(source, out, progress=compete)
    assert len(refused) == 4
    assert read_tree(out) == clean


def test_lock_is_taken_over_from_a_dead_process(tmp_path: Path) -> None:
    (tmp_path / output_files.LOCK_NAME).write_text("1\n")
    with output_files.exclusive_lock(tmp_path):
        assert (tmp_path / output_files.LOCK_NAME).read_text() == f"{os.getpid()}\n"
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_found_first(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="GB are needed"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_failing_disk_leaves_a_resumable_state(
    source: Path, clean: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    out, calls = tmp_path / "out", []
    original = os.pwrite

    def failing(descriptor: int, content: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 40:
            raise OSError(code, os.strerror(code))
        return original(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    for resume in (False, True):
        with pytest.raises(CheckpointError, match=os.strerror(code)) as raised:
            convert(source, out, resume=resume)
        assert ("--resume" in str(raised.value)) == (code != errno.EIO)
        assert not list(out.glob(".*.tmp"))
    monkeypatch.undo()
    convert(source, out, resume=True)
    assert read_tree(out) == clean


def test_read_only_file_system(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, *_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CheckpointError, match="Read-only"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("victim", [FIRST, "model-00004-of-00004.safetensors"])
@pytest.mark.parametrize(
    "damage", [lambda path: flip_bit(path, keep_times=True), truncate], ids=["changed", "truncated"]
)
def test_source_changed_while_it_is_converted(
    source: Path, tmp_path: Path, victim: str, damage: Callable[[Path], None]
) -> None:
    """Also a shard that was converted already, or comes last."""
    done: list[str] = []

    def change(event: Any) -> None:
        if event.kind == "file" and not done:
            done.append(event.message)
            time.sleep(0.02)
            damage(source / victim)

    with pytest.raises(CheckpointError, match=victim):
        convert(source, tmp_path / "out", progress=change)
    assert json.loads((tmp_path / "out" / MARKER).read_text())["complete"] is False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_with_one_line(
    source: Path, clean: dict[str, bytes], tmp_path: Path, number: signal.Signals
) -> None:
    slow = "import time, dsv4_converter.shard as s\nreal = s.ShardWriter.finish\n"
    slow += "s.ShardWriter.finish = lambda self: (print('writing', flush=True), time.sleep(1), real(self))\n"
    arguments = ["convert", "--input-dir", source, "--output-dir", tmp_path / "out"]
    command = [sys.executable, "-c", slow + RUN_COMMAND, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert error.splitlines()[-1] == f"dsv4 convert: stopped by {number.name}; continue with --resume"
    assert "Traceback" not in error
    assert not list((tmp_path / "out").glob(".*.tmp"))
    convert(source, tmp_path / "out", resume=True)
    assert read_tree(tmp_path / "out") == clean


def test_errors_of_the_command_are_one_line(tmp_path: Path) -> None:
    arguments = ["convert", "--input-dir", tmp_path / "none", "--output-dir", tmp_path / "out"]
    command = [sys.executable, "-c", "from dsv4.cli.main import main; main()", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert finished.stderr.splitlines() == [f"dsv4: error: {tmp_path / 'none'}: no such directory"]


def test_error_classes_are_the_projects_own() -> None:
    assert issubclass(ConversionCancelledError, Dsv4Error)
