"""The benchmarks of replays run, once and untimed, and their tables hold every plan."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from qsync_opt.build import build_problem
from qsync_opt.costs import Cluster, ClusterKind
from qsync_opt.simulate.replay import replay
from tests.benchmarks import replay_speed, replays
from tests.benchmarks.replay_runs import held_out_plans, random_table
from tests.cost_cases import made_up_costs
from tests.unit.measure.nets import capture_chain
from tests.unit.test_cost_commands import MODEL

pytestmark = pytest.mark.benchmark


def test_held_out_plans_are_predicted_and_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(MODEL.replace("nn.ReLU()", "nn.Linear(width, width)"))
    words = [str(tmp_path / "net.py") + ":width=16", "--plans", "9", "--seconds", "0"]
    assert replays.main([*words, "--budget", "0", "--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "replays.md").read_text() == shown
    (model,) = json.loads((tmp_path / "replays.json").read_text())["models"]
    rows = model["rows"]
    names = [row["plan"] for row in rows]
    assert names[:3] == ["all fp32", "all bf16", "all int8"]
    assert len(names) == len(set(names)) == 9
    assert {name.split()[0] for name in names[3:]} <= {"greedy", "exact", "mixed"}
    for row in rows:
        assert f"| {row['plan']} |" in shown
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        told = row["predicted"]
        parts = told["forward_s"] + told["backward_s"] + told["optimizer_s"]
        assert row["predicted_s"] == pytest.approx(parts)  # a CPU has no host, one rank no network
    errors = [abs(row["error"]) for row in rows]
    assert model["summary"]["all"]["median"] == statistics.median(errors)
    assert model["summary"]["all"]["worst"] == max(errors)


def test_plans_of_every_sort_are_held_out() -> None:
    graph = capture_chain()
    costs = {name: made_up_costs(graph, seed) for seed, name in enumerate(("strong", "weak"))}
    cluster = Cluster(kinds=tuple(ClusterKind(name=name) for name in costs))
    table = random_table(graph, costs["weak"], 0)
    problem = build_problem(graph, costs, table, cluster)
    plans = held_out_plans(graph, problem, costs, 15, 0)
    assert len(plans) == len(set(plans.values())) == 15
    assert {name.split()[0] for name in plans} == {"all", "greedy", "exact", "mixed"}
    assert held_out_plans(graph, problem, costs, 15, 0) == plans
    told = [replay(problem, plan).iteration_time_s for plan in plans.values()]
    assert min(told) == told[list(plans).index("exact +0%")]  # held to the fastest


def test_the_time_of_a_replay_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--operators", "20", "--repeats", "1", "--output", str(tmp_path)]
    assert replay_speed.main(words) == 0
    assert (tmp_path / "replay-speed.md").read_text() == capsys.readouterr().out
    rows = json.loads((tmp_path / "replay-speed.json").read_text())["rows"]
    assert [row["kinds"] for row in rows] == [100, 100, 2, 2]
