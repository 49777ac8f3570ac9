"""The page: whole, on its own, readable by everybody, and with the numbers of `evaluate`."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from qsync_opt.errors import FormatError, ParameterError, PlanError
from qsync_opt.optimize.evaluate import evaluate
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.solve import solve
from qsync_opt.report import ReportInputs, looks, write_report
from qsync_opt.simulate.replay import replay
from tests.unit.report.pages import Element, read_page, table_of


@pytest.fixture(scope="module")
def folder(inputs: ReportInputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page")
    written = write_report(inputs, path)
    assert {file.name for file in written} == {file.name for file in path.iterdir()}
    return path


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def page(text: str) -> Element:
    return read_page(text)


def test_nothing_is_loaded_from_anywhere(text: str, page: Element) -> None:
    assert "://" not in text
    for element in page.everything():
        assert element.tag not in ("script", "link", "iframe", "object", "embed", "img")
        for name in ("src", "href", "xlink:href", "data"):
            assert (element.attributes.get(name) or "#").startswith("#")
    assert re.findall(r"url\((?!#)", text) == []
    assert "@import" not in text


def test_ids_are_unique_and_every_reference_leads_somewhere(text: str, page: Element) -> None:
    ids = [one.attributes["id"] for one in page.everything() if "id" in one.attributes]
    assert len(set(ids)) == len(ids)
    wanted = {href.removeprefix("#") for href in re.findall(r'href="([^"]+)"', text)}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", text))
    for names in re.findall(r'aria-labelledby="([^"]+)"', text):
        wanted |= set(names.split())
    assert wanted
    assert wanted <= set(ids)


def test_pictures_have_words_and_tables_have_heads(page: Element) -> None:
    (root,) = page.find("html")
    assert root.attributes["lang"] == "en"
    pictures = page.find("svg")
    assert len(pictures) == 2 * len(page.find("figure")) == 12
    for picture in pictures:
        assert picture.attributes["role"] == "img"
        for tag in ("title", "desc"):
            (words,) = picture.find(tag)
            assert len(words.words()) > 10
    for table in page.find("table"):
        assert table.find("caption")[0].words()
        assert all(head.attributes.get("scope") == "col" for head in table.find("th"))


def test_every_colour_of_a_picture_has_a_light_and_a_dark_value(text: str, page: Element) -> None:
    for picture in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert not re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[;\"])", picture)
        used = set(re.findall(r"var\(--([a-z0-9]+)\)", picture)) - {"font"}
        assert used <= set(looks.COLOURS)
    sheet = page.find("style")[0].text
    for role, (light, dark) in looks.COLOURS.items():
        assert f"--{role}: {light};" in sheet
        assert f"--{role}: {dark};" in sheet.split("prefers-color-scheme: dark")[1]


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("role", sorted(set(looks.COLOURS) - {"paper", "grid"}))
def test_colours_stand_out_from_the_paper(role: str, mode: int) -> None:
    """WCAG 2.2: 4.5 for text (1.4.3), 3 for what a picture needs (1.4.11)."""
    colour, paper = (_luminance(looks.COLOURS[name][mode]) for name in (role, "paper"))
    contrast = (max(colour, paper) + 0.05) / (min(colour, paper) + 0.05)
    assert contrast >= (4.5 if role in ("ink", "muted", "forward") else 3.0)


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colours_that_are_replaced_are_told_apart() -> None:
    light = [colours[0] for colours in looks.COLOURS.values()]
    assert len(set(light)) == len(light)


def test_tables_of_the_page_are_the_csv_files(folder: Path, page: Element) -> None:
    names = [table.attributes["id"] for table in page.find("table")]
    files = {path.stem for path in folder.glob("*.csv")}
    assert set(names) == files
    for name in names:
        assert name is not None
        with (folder / f"{name}.csv").open() as stream:
            heads, *rows = csv.reader(stream)
        shown, cells = table_of(page, name)
        units = re.compile(r"_(s|bytes)$")
        assert shown == [units.sub("", head).replace("_", " ") for head in heads]
        assert cells == rows


def test_numbers_of_plans_are_those_of_evaluate(inputs: ReportInputs, page: Element) -> None:
    heads, rows = table_of(page, "plans")
    assert [row[0] for row in rows] == list(inputs.plans)
    for row in rows:
        found = dict(zip(heads, row, strict=True))
        judged = evaluate(inputs.problem, inputs.plans[row[0]], deadline_s=inputs.deadline_s)
        assert float(found["perturbation"]) == judged.perturbation
        assert float(found["iteration time"]) == judged.iteration_time_s
        assert found["feasible"] == ("yes" if judged.feasible else "no")
    heads, rows = table_of(page, "kinds")
    for row in rows:
        found = dict(zip(heads, row, strict=True))
        part = evaluate(inputs.problem, inputs.plans[row[0]]).devices[row[1]]
        assert float(found["compute"]) == part.compute_s
        assert int(found["peak memory"]) == part.peak_memory_bytes
        assert float(found["perturbation"]) == part.perturbation


def test_operators_times_and_memory_are_those_of_plan_and_replay(
    inputs: ReportInputs, page: Element
) -> None:
    heads, rows = table_of(page, "operators")
    for column, head in enumerate(heads[2:], 2):
        plan, kind = head.split(" on ")
        expected = inputs.plans[plan].for_device(kind)
        assert {row[0]: row[column] for row in rows} == {k: str(v) for k, v in expected.items()}
    heads, rows = table_of(page, "timeline")
    for row in rows:
        found = dict(zip(heads, row, strict=True))
        replayed = replay(inputs.problem, inputs.plans[row[0]])
        assert float(found["iteration time"]) == replayed.iteration_time_s
        assert float(found["waiting"]) == replayed.kinds[row[1]].waiting_s
    heads, rows = table_of(page, "memory")
    for row in rows:
        terms = [int(cell) for cell in row[4:]]
        judged = evaluate(inputs.problem, inputs.plans[row[0]]).devices[row[1]]
        assert int(row[2]) == sum(terms) == judged.peak_memory_bytes


def test_errors_are_measured_over_predicted(inputs: ReportInputs, page: Element) -> None:
    _, rows = table_of(page, "errors")
    assert rows[0][0] == "exact: step of the job"
    assert float(rows[0][1]) == evaluate(inputs.problem, inputs.plans["exact"]).iteration_time_s
    assert float(rows[0][2]) == inputs.runs["exact"].step_s
    for _, predicted, measured, error in rows:
        assert float(error) == pytest.approx(float(measured) / float(predicted) - 1)
    # The trace is the prediction itself, so every operator took what was predicted.
    _, rows = table_of(page, "operator-times")
    assert rows
    for row in rows:
        assert float(row[5]) == pytest.approx(float(row[4]), rel=1e-9, abs=1e-12)


def test_the_same_inputs_give_the_same_bytes(inputs: ReportInputs, tmp_path: Path) -> None:
    bare = replace(inputs, plans={"exact": inputs.plans["exact"]}, runs={}, steps={}, curve=())
    for name in ("a", "b"):
        write_report(bare, tmp_path / name)
    first = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


def test_what_is_missing_is_said_and_left_out(
    small_problem: AllocationProblem, tmp_path: Path
) -> None:
    written = write_report(ReportInputs(problem=small_problem), tmp_path)
    assert [path.name for path in written] == ["report.html"]
    page = read_page((tmp_path / "report.html").read_text())
    assert page.find("svg") == page.find("table") == []
    told = [p.words() for p in page.find("p") if p.attributes.get("class") == "missing"]
    assert len(told) == len(page.find("section")) == 7
    for option in ("--plan", "--solve", "--pareto", "--metrics"):
        assert any(option in words for words in told)


def test_names_from_files_are_text_and_nothing_else(tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script> & $^{"
    problem = generate_problem(operators=4, precisions=2, devices=1, seed=0)
    device = replace(problem.devices[0], name=hostile)
    first = replace(problem.operators[0], name=f"<b>{hostile}")
    problem = replace(
        problem, name=hostile, devices=(device,), operators=(first, *problem.operators[1:])
    )
    plan = solve(problem).require_plan()
    write_report(ReportInputs(problem=problem, plans={hostile: plan}), tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = read_page(text)
    assert page.find("script") == page.find("b") == []
    assert page.find("h1")[0].words() == hostile
    assert table_of(page, "operators")[1][0][0] == first.name


def test_what_does_not_belong_together_is_refused(
    inputs: ReportInputs, small_problem: AllocationProblem
) -> None:
    other = generate_problem(operators=5, precisions=2, devices=1, seed=0)
    with pytest.raises(PlanError, match="hash"):
        ReportInputs(problem=other, plans=inputs.plans)
    with pytest.raises(ParameterError, match="trace: must be of a plan"):
        ReportInputs(problem=small_problem, steps=inputs.steps)
    with pytest.raises(ParameterError, match="hosts: must name device kinds"):
        ReportInputs(problem=small_problem, hosts={"none": None})  # type: ignore[dict-item]


def test_without_matplotlib_the_extra_is_named(
    inputs: ReportInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "find_spec", lambda name: None)
    with pytest.raises(ParameterError, match=r"pip install 'qsync-opt\[report\]'"):
        write_report(inputs, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_named(inputs: ReportInputs, tmp_path: Path) -> None:
    (tmp_path / "precision.png").mkdir()
    with pytest.raises(FormatError, match=r"precision\.png"):
        write_report(inputs, tmp_path)


def test_csv_cells_are_exact(folder: Path, inputs: ReportInputs) -> None:
    rows = list(csv.DictReader(io.StringIO((folder / "losses.csv").read_text())))
    assert [float(row["exact"]) for row in rows] == list(inputs.runs["exact"].losses)


def test_bits_of_buckets_are_those_of_the_plans(tmp_path: Path) -> None:
    problem = generate_problem(operators=12, precisions=2, devices=2, communication=(16, 8))
    plans = {m: solve(problem, method=m).require_plan() for m in ("exact", "fastest")}
    write_report(ReportInputs(problem=problem, plans=plans), tmp_path)
    with (tmp_path / "buckets.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    for name, plan in plans.items():
        mine = [row for row in rows if row["plan"] == name]
        bits = plan.communication or (32,) * len(problem.buckets)
        assert [int(row["bits"]) for row in mine] == list(bits)
        added = sum(float(row["perturbation"]) for row in mine)
        assert added == pytest.approx(problem.bits_perturbation(bits))
        sent_s = [bucket.all_reduce_s for bucket in problem.at_bits(bits).buckets]
        assert [float(row["all_reduce_s"]) for row in mine] == sent_s
    assert {int(row["bits"]) for row in rows} - {32}
