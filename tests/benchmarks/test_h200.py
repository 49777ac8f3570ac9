"""The measurement on an H200, tried on a CPU: its files make problems, nothing is done twice."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from problems.measured import NVLINK_S, SLACK, MeasuredModel, at_uniform, measured_problem
from qsync_opt.costs import DeviceCosts
from qsync_opt.files import load_costs, load_problem, save_costs
from qsync_opt.precision import Precision
from tests.benchmarks import h200, h200_tables
from tests.unit.test_cost_commands import MODEL

NET = MeasuredModel(name="net", file="net.py", sizes=(("batch_size", 4),))


def slower(costs: DeviceCosts, factor: float) -> DeviceCosts:
    table = costs.operators
    forward_s, backward_s = table.forward_s * factor, table.backward_s * factor
    return replace(costs, operators=replace(table, forward_s=forward_s, backward_s=backward_s))


@pytest.mark.benchmark
def test_one_model_leaves_files_that_make_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    net = replace(NET, file=str(tmp_path / "net.py"))
    monkeypatch.setattr(h200, "BY_NAME", {"net": net})
    monkeypatch.setattr(h200, "MODELS", (net,))
    monkeypatch.setattr(h200, "BUDGET_S", 0.0)
    folder, results = tmp_path / "measured", tmp_path / "results"
    pack = tmp_path / "out" / "all.tar.gz"
    words = ["net", "--device", "cpu", "--plans", "1", "--folder", str(folder)]
    words += ["--results", str(results), "--pack", str(pack)]
    assert h200.main([*words, "--one", "100"]) == 0
    report = json.loads((results / "h200-net-100.json").read_text())
    assert [row["precision"] for row in report["uniform"]] == ["fp32", "bf16", "int8"]
    assert [row["plan"] for row in report["plans"]][-1] == "mixed 0"
    assert set(report["kinds"]) == {"fp32", "bf16", "int8"}
    total = sum(sum(pair) for pair in report["kinds"]["fp32"].values())
    told = report["uniform"][0]
    assert total == pytest.approx(told["predicted_forward_s"] + told["predicted_backward_s"])

    costs = load_costs(folder / net.costs(100))
    save_costs(slower(costs, 1.1), folder / net.costs(25))
    save_costs(slower(costs, 1000.0), folder / net.costs(12))
    for share in (25, 12):
        assert h200.main([*words, "--one", str(share)]) == 0
        problem = measured_problem(net, share, folder)
        assert load_problem(tmp_path / f"net-h200-{share}.json.gz").sha256 == problem.sha256
        weak = problem.devices[1]
        assert weak.memory_bytes <= costs.memory.device_bytes * share // 100
        assert all(bucket.all_reduce_s == NVLINK_S for bucket in problem.buckets)
        assert "25 MiB measured in 0.12 ms" in problem.provenance
    times = [at_uniform(problem, d.name, Precision.FP32).iteration_time_s for d in problem.devices]
    assert times[1] > 10 * times[0]
    assert (problem.deadline_s, problem.slack) == (None, SLACK)  # of the fastest plan there is

    capsys.readouterr()
    assert h200.main(words) == 0  # every share is there, so no process is started
    assert capsys.readouterr().out.count("is there") == 3
    h200.main([*words, "--shares", "100"])
    with tarfile.open(pack) as archive:
        assert "problems/measured/net.graph.json.gz" in archive.getnames()


def test_the_page_is_of_the_kept_rows() -> None:
    reports = [
        json.loads(path.read_text()) for path in sorted(h200_tables.RESULTS.glob("h200-*.json"))
    ]
    text = h200_tables.page(reports)
    assert text == (h200_tables.RESULTS / "h200.md").read_text()
    whole = next(
        report for report in reports if report["model"].endswith("gpt.py") and "plans" in report
    )
    plan = whole["plans"][0]  # fp32 throughout: no casts
    predicted_s = plan["predicted_forward_s"] + plan["predicted_backward_s"]
    expected = predicted_s / (plan["forward_s"] + plan["backward_s"]) - 1
    assert h200_tables.rows_of(whole)[0]["time_error"] == pytest.approx(expected, rel=1e-9)
