"""The Pareto curve as an image and as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

from qsync_opt import report
from qsync_opt.errors import FormatError, ParameterError
from qsync_opt.optimize.compare import pareto
from qsync_opt.optimize.comparison import ParetoCurve
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.report import looks


@pytest.fixture(scope="module")
def curve(small_problem: AllocationProblem) -> ParetoCurve:
    return pareto(small_problem, slacks=(0.0, 0.1, 0.5), methods=("uniform", "greedy"))


def test_csv_holds_every_row_to_the_last_digit(curve: ParetoCurve) -> None:
    rows = list(csv.reader(io.StringIO(report.pareto_csv(curve))))
    assert tuple(rows[0]) == curve.columns
    assert rows[1:] == [["" if v is None else str(v) for v in row] for row in curve.rows()]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".PNG"])
def test_the_same_curve_gives_the_same_image(
    curve: ParetoCurve, tmp_path: Path, suffix: str
) -> None:
    paths = [tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"]
    for path in paths:
        report.plot_pareto(curve, path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    magic = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix.lower()]
    assert first.startswith(magic)


def test_the_image_names_axes_units_and_methods(curve: ParetoCurve, tmp_path: Path) -> None:
    # As text instead of outlines, so that it can be read back.
    mpl = pytest.importorskip("matplotlib")
    with mpl.rc_context({"svg.fonttype": "none"}):
        report.plot_pareto(curve, tmp_path / "curve.svg")
    text = (tmp_path / "curve.svg").read_text()
    for word in ("iteration time (", "perturbation", "uniform", "greedy", curve.problem):
        assert word in text


def test_a_dollar_sign_in_a_name_is_no_mathematics(curve: ParetoCurve, tmp_path: Path) -> None:
    report.plot_pareto(replace(curve, problem="cost $5 and $^{"), tmp_path / "curve.png")


def test_what_cannot_be_drawn_is_refused(curve: ParetoCurve, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"plot: must end in \.png, \.svg, \.pdf"):
        report.plot_pareto(curve, tmp_path / "curve.bmp")
    with pytest.raises(ParameterError, match="at least one plan"):
        report.plot_pareto(replace(curve, points=()), tmp_path / "curve.png")
    with pytest.raises(FormatError, match="curve.png"):
        report.plot_pareto(curve, tmp_path / "missing" / "curve.png")
    assert not list(tmp_path.iterdir())


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "find_spec", lambda name: None)
    with pytest.raises(ParameterError, match=r"pip install 'qsync-opt\[report\]'"):
        report.check_image("curve.png")


def test_points_read_back_are_those_of_the_curve(curve: ParetoCurve) -> None:
    read = report.read_curve(report.pareto_csv(curve), "points.csv")
    assert read == report.curve_of(curve)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a,b\n1,2\n", "columns"),
        (
            "slack,method,deadline_s,objective,bound,iteration_time_s\n0,exact,1,x,1,1\n",
            "objective",
        ),
        ("slack,method,deadline_s,objective,bound,iteration_time_s\n,exact,1,1,1,1\n", "slack"),
        ("slack,method,deadline_s,objective,bound,iteration_time_s\n0,exact,1,nan,1,1\n", "finite"),
    ],
)
def test_a_file_that_is_no_curve_is_refused(text: str, named: str) -> None:
    with pytest.raises(FormatError, match=named):
        report.read_curve(text, "points.csv")
