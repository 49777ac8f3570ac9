"""Pictures can be read: no label is cut off or lies on another, at either width."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.solve import solve
from qsync_opt.report import ReportInputs, looks, write_report
from qsync_opt.report.picture import NARROW, WIDE, Picture
from qsync_opt.report.precision_map import parts_of, strips_of
from qsync_opt.report.sections import sections_of
from qsync_opt.report.timelines import thinned

#: Shares of a label's height: ascenders and descenders of neighbours may meet.
_TOUCH = 0.25


def pictures_of(inputs: ReportInputs) -> dict[str, Picture]:
    return {
        picture.name: picture for section in sections_of(inputs) for picture in section.pictures
    }


def labels_of(figure: Figure) -> list[tuple[str, Bbox]]:
    """What is written in a figure, and where."""
    figure.draw_without_rendering()
    found = []
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        axes = text.axes
        shown = text.get_visible() and text.get_text().strip()
        if shown and (axes is None or axes.get_visible()):
            found.append((text.get_text(), text.get_window_extent()))
    for axes in figure.axes:  # ticks outside of the limits are there, and not drawn
        hidden = set()
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(limits)
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low <= tick.get_loc() <= high or not tick.label1.get_visible():
                    hidden |= {
                        (label.get_text(), label.get_window_extent().bounds)
                        for label in (tick.label1, tick.label2)
                    }
        found = [(words, box) for words, box in found if (words, box.bounds) not in hidden]
    return found


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", ["precision", "timeline", "memory", "pareto", "losses", "errors"])
def test_labels_are_whole_and_apart(inputs: ReportInputs, name: str, width: float) -> None:
    picture = pictures_of(inputs)[name]
    with looks.drawing():
        figure = picture.draw(width)
        labels = labels_of(figure)
    assert labels
    paper = figure.bbox
    for words, box in labels:
        assert box.x0 >= paper.x0 - 1, words
        assert box.x1 <= paper.x1 + 1, words
        assert box.y0 >= paper.y0 - 1, words
        assert box.y1 <= paper.y1 + 1, words
    for (first, one), (second, other) in itertools.combinations(labels, 2):
        common = Bbox.intersection(one, other)
        if common is not None:
            room = _TOUCH * min(one.height, other.height)
            assert min(common.width, common.height) <= room, (first, second)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_text_can_be_read_on_a_phone(inputs: ReportInputs, width: float) -> None:
    for picture in pictures_of(inputs).values():
        with looks.drawing():
            sizes = [float(text.get_fontsize()) for text in picture.draw(width).findobj(Text)]
        # 4.2 inches of 72 points on 360 pixels: 7 points are more than 8 pixels.
        assert min(sizes) >= 7


def test_the_words_of_a_picture_hold_its_numbers(inputs: ReportInputs) -> None:
    pictures = pictures_of(inputs)
    for name in inputs.plans:
        for picture in ("precision", "timeline", "memory", "pareto"):
            assert name in pictures[picture].description
    for strip in strips_of(inputs.problem, "exact", inputs.plans["exact"]):
        chosen = [p for p, free in zip(strip.precisions, strip.chosen, strict=True) if free]
        for precision in set(chosen):
            assert f"{precision} {chosen.count(precision)}" in pictures["precision"].description


def test_parts_are_the_longest_prefixes_that_are_few() -> None:
    names = [f"blocks.{n}.{part}" for n in range(12) for part in ("attention", "mlp.fc1")]
    parts = parts_of(["embed", *names, "head"])
    assert [name for name, _, _ in parts] == ["embed", *(f"blocks.{n}" for n in range(12)), "head"]
    assert [start for _, start, _ in parts] == [0, *range(1, 25, 2), 25]
    many = parts_of([f"layer{n}" for n in range(100)])
    assert many == [("", 0, 100)]


def test_a_crowded_lane_shows_what_takes_most_of_each_moment() -> None:
    edges = np.linspace(0.0, 1.0, 4001).tolist()
    words = ["forward"] * 2000 + ["backward"] * 2000
    words[::50] = ["cast"] * 80  # one in fifty: never the most of a slot of five
    blocks = list(zip(words, edges[:-1], edges[1:], strict=True))
    first, second = thinned(blocks, 2.0)
    assert first[0] == "forward"
    assert first[1:] == pytest.approx((0.0, 0.5), abs=2.5e-3)
    assert second[0] == "backward"
    assert second[1:] == pytest.approx((0.5, 1.0), abs=2.5e-3)
    assert thinned(blocks[:700], 2.0) == blocks[:700]


def test_a_large_problem_makes_a_small_page(tmp_path: Path) -> None:
    problem = generate_problem(operators=3000, precisions=4, devices=2, seed=0)
    plan = solve(problem, method="uniform").plan or solve(problem, method="fastest").require_plan()
    write_report(ReportInputs(problem=problem, plans={"plan": plan}), tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 2**20
    assert len((tmp_path / "operators.csv").read_text().splitlines()) == 3001
