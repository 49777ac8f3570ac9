"""Files: bad ones are refused with their place, good ones come back, writing is all or nothing."""

from __future__ import annotations

import gc
import gzip
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsync_opt import files
from qsync_opt.errors import FieldError, FormatError, PlanError
from qsync_opt.files import (
    load_costs,
    load_graph,
    load_perturbations,
    load_plan,
    load_problem,
    read_bytes,
    save_plan,
    save_problem,
    write_atomically,
)
from qsync_opt.optimize.evaluate import plan_from_columns
from qsync_opt.plan import PrecisionPlan
from tests.problems_for_tests import problem_from_json, tiny_json, tiny_problem


def text_of(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


TINY = text_of(tiny_json())


def written(folder: Path, content: bytes, name: str = "problem.json") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


# Whole files.


@pytest.mark.parametrize("name", ["problem.json", "problem.json.gz"])
def test_problem_comes_back_and_equal_problems_give_equal_bytes(name: str, tmp_path: Path) -> None:
    problem = tiny_problem()
    save_problem(problem, tmp_path / name)
    again = load_problem(tmp_path / name)
    assert again == problem
    (tmp_path / "other").mkdir()
    save_problem(again, tmp_path / "other" / name)
    assert (tmp_path / "other" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_plan_comes_back(name: str, tmp_path: Path) -> None:
    problem = tiny_problem()
    fp32 = [device.forward_s.argmin(axis=1) * 0 for device in problem.devices]
    plan = plan_from_columns(problem, fp32)
    save_plan(plan, tmp_path / name)
    assert load_plan(tmp_path / name) == plan


def test_packed_file_is_the_plain_one_packed(tmp_path: Path) -> None:
    save_problem(tiny_problem(), tmp_path / "a.json")
    save_problem(tiny_problem(), tmp_path / "a.json.gz")
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == (
        (tmp_path / "a.json").read_bytes()
    )


def test_every_truncation_of_a_packed_file_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(TINY, mtime=0)
    path = written(tmp_path, packed, "problem.json.gz")
    for length in reversed(range(len(packed))):
        os.truncate(path, length)
        with pytest.raises(FormatError):
            load_problem(path)


def test_every_damaged_byte_of_a_packed_file_is_refused_or_harmless(tmp_path: Path) -> None:
    packed = gzip.compress(TINY, mtime=0)
    problem = tiny_problem()
    path = tmp_path / "problem.json.gz"
    for position in range(len(packed)):
        damaged = bytearray(packed)
        damaged[position] ^= 0xFF
        path.write_bytes(bytes(damaged))
        try:
            assert load_problem(path) == problem  # header bytes that mean nothing
        except FormatError:
            continue


def test_signed_zeros_keep_their_sign(tmp_path: Path) -> None:
    data = tiny_json()
    data["devices"][0]["forward_s"][0][0] = -0.0
    problem = problem_from_json(data)
    save_problem(problem, tmp_path / "a.json")
    again = load_problem(tmp_path / "a.json").devices[0].forward_s
    assert str(again[0, 0]) == "-0.0"
    content = TINY.replace(b'"bytes":4000', b'"bytes":-0')
    assert load_problem(written(tmp_path, content)).buckets[0].size_bytes == 0


def test_optional_keys_may_be_left_out(tmp_path: Path) -> None:
    data = tiny_json()
    del data["groups"], data["deadline_s"], data["slack"]
    for device in data["devices"]:
        del device["pins"], device["forward_transient_bytes"], device["backward_transient_bytes"]
    problem = load_problem(written(tmp_path, text_of(data)))
    assert (problem.groups, problem.deadline_s, problem.slack) == ((), None, 0.0)
    assert all(not device.pins for device in problem.devices)
    save_problem(problem, tmp_path / "again.json")
    assert load_problem(tmp_path / "again.json") == problem


def test_plan_with_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    data = {
        "format": "qsync-opt/plan",
        "version": 1,
        "problem": "x",
        "devices": {"weak": {"fc": "fp7"}},
    }
    with pytest.raises(PlanError, match="devices.weak.fc: must be one of fp32, .* got 'fp7'"):
        load_plan(written(tmp_path, text_of(data)))
    data["devices"] = {"weak": {"fc": None}}
    with pytest.raises(FormatError, match="devices.weak.fc: must be a string, got None"):
        load_plan(written(tmp_path, text_of(data)))


@pytest.mark.parametrize(
    ("load", "changes"),
    [
        (load_problem, {"nothing": 1}),
        (load_problem, {"version": 99}),
        (load_problem, {"slack": -1.0, "deadline_s": None}),
        (load_plan, {}),
        (load_graph, {}),
        (load_costs, {}),
        (load_perturbations, {}),
    ],
)
def test_errors_say_in_which_file_the_field_stands_once(
    load: Callable[[Path], object], changes: dict[str, object], tmp_path: Path
) -> None:
    """Commands are given several files; what is wrong is in one of them."""
    path = written(tmp_path, text_of({**tiny_json(), **changes}), "odd.json")
    with pytest.raises(FieldError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).count(str(path)) == 1


# Paths.


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="No such file") as caught:
        load_problem(tmp_path / "none.json")
    assert caught.value.field == str(tmp_path / "none.json")
    with pytest.raises(FormatError, match="must be a regular file"):
        load_problem(tmp_path)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\ud800", 7, None])
@pytest.mark.parametrize("load", [load_problem, load_plan])
def test_impossible_paths_are_refused(path: Any, load: Callable[[Any], object]) -> None:
    with pytest.raises(FormatError):
        load(path)
    with pytest.raises(FormatError):
        write_atomically(path, b"")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no named pipes")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(FormatError, match="must be a regular file"):
        load_problem(tmp_path / "pipe.json")
    with pytest.raises(FormatError, match="must be a regular file"):
        save_problem(tiny_problem(), tmp_path / "pipe.json")


def test_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, TINY)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FormatError, match="must be a file that can be read.*Permission denied"):
        load_problem(path)


def test_a_plain_file_named_gz_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="must be a file that can be read"):
        load_problem(written(tmp_path, TINY, "problem.json.gz"))


@pytest.mark.parametrize("packed", [False, True])
def test_large_files_are_refused_before_they_are_parsed(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b" " * 1000 + TINY
    path = tmp_path / ("problem.json.gz" if packed else "problem.json")
    path.write_bytes(gzip.compress(content) if packed else content)
    monkeypatch.setattr(files, "LARGEST_FILE_BYTES", len(content))
    assert load_problem(path) == tiny_problem()
    monkeypatch.setattr(files, "LARGEST_FILE_BYTES", len(content) - 1)
    with pytest.raises(FormatError, match=f"must be at most {len(content) - 1} bytes"):
        load_problem(path)


def test_a_packed_bomb_is_unpacked_to_the_limit_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LARGEST_FILE_BYTES", 10_000)
    bomb = written(tmp_path, gzip.compress(b"[" * 10_000_000), "bomb.json.gz")
    read: list[int | None] = []
    unpack = gzip.GzipFile.read

    def counted(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        read.append(size)
        return unpack(self, size)

    monkeypatch.setattr(gzip.GzipFile, "read", counted)
    with pytest.raises(FormatError, match="must be at most 10000 bytes"):
        read_bytes(bomb)
    assert read == [10_001]


# Writing is all or nothing.


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, b"old")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(FormatError, match="No space left on device") as caught:
                save_problem(tiny_problem(), path)
        assert caught.value.field == str(path)
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == [path.name]


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, b"old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [path.name]


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="must be a path that can be written, got 'No such file"):
        save_problem(tiny_problem(), tmp_path / "none" / "a.json")


def test_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="must be a regular file"):
        save_problem(tiny_problem(), tmp_path)


def test_a_device_is_not_replaced_by_a_file() -> None:
    with pytest.raises(FormatError, match="must be a regular file"):
        save_problem(tiny_problem(), os.devnull)
    assert not Path(os.devnull).is_file()


def test_names_up_to_the_longest_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250 + ".json")
    save_problem(tiny_problem(), path)
    assert load_problem(path) == tiny_problem()


def test_the_mode_of_a_replaced_file_is_kept_and_a_new_one_follows_the_umask(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, b"old")
    path.chmod(0o640)
    write_atomically(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    write_atomically(tmp_path / "fresh", b"new")
    assert (tmp_path / "fresh").stat().st_mode == plain.stat().st_mode


def test_a_link_is_followed(tmp_path: Path) -> None:
    target = written(tmp_path, b"old")
    link = tmp_path / "link.json"
    link.symlink_to(target)
    save_problem(tiny_problem(), link)
    assert link.is_symlink()
    assert load_problem(target) == tiny_problem()


def test_the_collector_is_left_as_it_was(tmp_path: Path) -> None:
    good = written(tmp_path, TINY)
    bad = written(tmp_path, b"{", "bad.json")
    was_enabled = gc.isenabled()
    try:
        for enable in (gc.enable, gc.disable):
            enable()
            expected = gc.isenabled()
            load_problem(good)
            assert gc.isenabled() is expected
            with pytest.raises(FormatError):
                load_problem(bad)
            assert gc.isenabled() is expected
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_a_plan_file_is_plain_json(tmp_path: Path) -> None:
    plan = PrecisionPlan(problem="abc", devices={"weak": {"fc": "int8"}})  # type: ignore[dict-item]
    save_plan(plan, tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == {
        "format": "qsync-opt/plan",
        "version": 1,
        "problem": "abc",
        "devices": {"weak": {"fc": "int8"}},
    }


def test_a_problem_file_holds_what_the_format_says(tmp_path: Path) -> None:
    save_problem(tiny_problem(), tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text("utf-8")) == tiny_json()
