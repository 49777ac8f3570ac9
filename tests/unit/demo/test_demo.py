"""The demonstration: a task from its model to the report, and the devices that it finds."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from qsync_opt import cli, demo_commands
from qsync_opt.demo import devices
from qsync_opt.demo.devices import DemoDevice, DemoMachine, cpu_machine, demo_machine
from qsync_opt.demo.group import run_group
from qsync_opt.demo.lines import Lines
from qsync_opt.demo.pipeline import METHODS, run_task
from qsync_opt.demo.tasks import TASKS, DemoTask, find_task
from qsync_opt.errors import MeasureError, ParameterError
from qsync_opt.files import load_costs, load_plan, load_problem
from qsync_opt.optimize.evaluate import evaluate
from qsync_opt.optimize.result import SolveParameters
from qsync_opt.report import read_run
from qsync_opt.runtime.launch import parse_ranks
from tests.unit.report.pages import read_page, table_of

MODEL = """
import torch
from torch import nn

def build(batch_size=4, width=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    batch = torch.randn(batch_size, 6), torch.randint(0, 3, (batch_size,))
    return model, batch, nn.functional.cross_entropy
"""

ONE_THREAD_EACH = DemoMachine(
    device_type="cpu",
    devices=(
        DemoDevice(kind="strong", words="CPU", threads=1),
        DemoDevice(kind="weak", words="CPU", threads=1),
    ),
)


@pytest.mark.slow
def test_a_task_from_its_model_to_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    task = DemoTask(
        name="net",
        words="A net",
        model=tmp_path / "net.py",
        sizes={"batch_size": 64, "width": 32},
        steps=8,
        learning_rate=1e-2,
    )
    folder = tmp_path / "out"
    facts, comparison = run_task(
        ONE_THREAD_EACH,
        task,
        folder,
        slacks=(0.0, 0.2),
        parameters=SolveParameters(relative_gap=0.0),
        shown=True,
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [name.split()[0] for name in facts]
    assert all(line.endswith("]") for line in lines)
    # The files are those that the commands read, and the plans keep the pace and the memory.
    problem = load_problem(folder / "problem.json")
    assert {
        load_costs(folder / f"costs-{kind}.json").all_reduce is None for kind in ("strong", "weak")
    } == {False}
    assert (folder / "problem.mps.gz").stat().st_size
    found = {}
    for row in comparison.rows:
        judged = evaluate(problem, load_plan(folder / f"plan-{row.method}.json"))
        assert judged.feasible
        found[row.method] = judged.perturbation
    assert list(found) == list(METHODS)
    assert 0 < found["exact"] <= found["greedy"] <= found["uniform"]
    # Both jobs and the yardstick took every step on both kinds.
    for name in ("exact", "uniform", "fp32"):
        run = read_run(folder / f"train-{name}")
        assert [(rank.kind, rank.steps) for rank in run.ranks] == [("strong", 8), ("weak", 8)]
        assert len(run.losses) == 8
    assert len({read_run(folder / f"train-{n}").losses[0] for n in ("uniform", "exact")}) <= 2
    page = read_page((folder / "report.html").read_text())
    assert page.find("h1")[0].words() == "A net"
    assert len(page.find("figure")) == 6
    heads, rows = table_of(page, "plans")
    column = heads.index("perturbation")
    assert {row[0]: float(row[column]) for row in rows} == found
    assert table_of(page, "operator-times")[1]


def test_a_problem_alone_is_solved_and_reported(
    problem_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", str(problem_file), "-o", str(tmp_path / "out"), "--slacks", "0", "--json"]
    assert cli.main(words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["solve", "export", "replay", "report", "files"]
    names = {Path(name).name for name in shown["files"]}
    assert names >= {"report.html", "pareto.png", "pareto.csv", "problem.mps.gz"}
    assert names >= {f"plan-{method}.json" for method in METHODS}


# --- devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
def test_two_processes_on_a_cpu_are_unequal(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    machine = cpu_machine()
    strong, weak = machine.devices
    assert (strong.threads, weak.threads) == (max(2, cores - 1), 1)
    assert bool(machine.note) == (cores < 3)


def test_a_device_is_a_rank_of_train() -> None:
    device = DemoDevice(kind="weak", words="", threads=3)
    (rank,) = parse_ranks(device.ranks())
    assert (rank.kind, rank.count, rank.threads) == ("weak", 1, 3)
    (rank,) = parse_ranks(DemoDevice(kind="weak", words="", mps_percent=25).ranks())
    assert (rank.threads, rank.mps_percent) == (None, 25)


def control(folder: Path, text: str) -> Path:
    """A stand-in for NVIDIA's program; what it is told goes to a file beside it."""
    path = folder / "nvidia-cuda-mps-control"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_equal_gpus_share_through_mps_and_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    control(tmp_path, f'echo "[$*] $(cat)" "$CUDA_MPS_PIPE_DIRECTORY" >> {log}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", "before")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(devices, "gpu_names", lambda: ["H", "H"])
    places = []

    def fail_inside() -> None:
        with demo_machine() as machine:
            places.append(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
            assert Path(places[0]).is_dir()
            assert machine.device_type == "cuda"
            assert [device.mps_percent for device in machine.devices] == [None, 25]
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    (place,) = places
    assert log.read_text().splitlines() == [f"[-d]  {place}", f"[] quit {place}"]
    assert not Path(place).exists()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert os.environ["CUDA_MPS_LOG_DIRECTORY"] == "before"


def test_a_daemon_that_does_not_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control(tmp_path, "echo no permission >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(devices, "gpu_names", lambda: ["H", "H"])
    with pytest.raises(MeasureError, match="no permission"), demo_machine():
        pass


def test_unequal_gpus_need_no_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ["H", "L"])
    with demo_machine() as machine:
        assert [device.words for device in machine.devices] == ["H", "L"]
        assert [device.mps_percent for device in machine.devices] == [None, None]


def test_fewer_than_two_gpus_are_refused_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ["H"])
    with pytest.raises(MeasureError, match="finds 1 GPUs"), demo_machine("cuda"):
        pass
    with demo_machine() as machine:
        assert machine.device_type == "cpu"


# --- the parts --------------------------------------------------------------------------


def test_the_tasks_of_the_command_line_are_those_of_the_demo() -> None:
    assert demo_commands.TASKS == TASKS


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_task_builds_its_model(name: str, device_type: str) -> None:
    task = find_task(name, device_type, steps=3)
    assert task.model.is_file()
    assert task.steps == 3
    source = task.model.read_text()
    assert all(f"{key}: int" in source for key in task.sizes)


def test_a_task_without_its_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qsync_opt.__file__", str(tmp_path / "qsync_opt" / "__init__.py"))
    with pytest.raises(ParameterError, match="models/"):
        find_task("digits", "cpu")


def test_a_rank_that_fails_ends_the_group_and_is_named(tmp_path: Path) -> None:
    waits = ["train", str(tmp_path / "none.py"), "--steps", "1"]
    with pytest.raises(MeasureError, match=r"rank 1 .*--sizes"):
        run_group([["--help"], [*waits, "--sizes", "1"]], [{}, {}])


def test_lines_tell_steps_only_to_people(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        lines = Lines(1, shown)
        with lines.step("solve", "solving") as line:
            line.text, line.facts = "3 plans", {"plans": 3}
        assert lines.facts["solve"]["plans"] == 3
        assert ("3 plans [" in capsys.readouterr().out) == shown
