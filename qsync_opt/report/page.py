"""The HTML page: one file, nothing loaded from anywhere, light and dark, for any width."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from qsync_opt import __version__, console
from qsync_opt.report import looks
from qsync_opt.report.inputs import ReportInputs
from qsync_opt.report.sections import Section, headline

_OPTION = re.compile(r"(--[a-z][a-z-]*)")

_SHEET = """
:root { color-scheme: light dark; --font: system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; LIGHT }
@media (prefers-color-scheme: dark) { :root { DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1rem 3rem; max-width: 64rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 var(--font); overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 0.4rem; padding-top: 0.5rem;
  border-top: 1px solid var(--grid); }
p { margin: 0.4rem 0; }
.lead { font-size: 1.1rem; }
.small, .missing, figcaption, footer { color: var(--muted); font-size: 0.9rem; }
code { white-space: nowrap; }
.missing { border-left: 3px solid var(--fp8); padding-left: 0.6rem; }
a { color: var(--forward); }
nav ul { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; padding: 0; margin: 0.8rem 0 0;
  list-style: none; }
nav a { display: inline-block; padding: 0.25rem 0; }
dl.key { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr));
  gap: 0.6rem; margin: 1rem 0; }
dl.key div { border: 1px solid var(--grid); border-radius: 0.4rem; padding: 0.5rem 0.7rem; }
dl.key dt { color: var(--muted); font-size: 0.85rem; }
dl.key dd { margin: 0; font-size: 1.25rem; font-weight: 600; }
figure { margin: 0.8rem 0; }
figure svg { display: block; width: 100%; height: auto; }
figure svg.narrow { display: none; }
#picture-pareto svg, #picture-losses svg, #picture-errors svg { max-width: 46rem; }
@media (max-width: 40rem) {
  figure svg.wide { display: none; }
  figure svg.narrow { display: block; }
}
svg text { font-family: var(--font); }
summary { cursor: pointer; padding: 0.4rem 0; }
.scroll { overflow-x: auto; max-height: 30rem; overflow-y: auto; margin: 0.4rem 0 1rem; }
table { border-collapse: collapse; font-size: 0.84rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0.2rem 0; }
th, td { padding: 0.25rem 0.6rem 0.25rem 0; border-bottom: 1px solid var(--grid);
  text-align: left; vertical-align: top; overflow-wrap: normal; }
th { color: var(--muted); font-weight: 600; }
.number { text-align: right; white-space: nowrap; }
td:first-child { white-space: nowrap; }
:focus-visible { outline: 2px solid var(--forward); outline-offset: 2px; }
@media print { .scroll { max-height: none; overflow: visible; } }
"""


def page(inputs: ReportInputs, sections: Sequence[Section], files: Sequence[str]) -> str:
    """The whole page.

    Args:
        inputs: what the report shows.
        sections: its sections.
        files: names of the files beside it.
    """
    name = escape(inputs.problem.name)
    links = "".join(
        f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section in sections
    )
    body = "\n".join(_section(section) for section in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{name}: precision plans</title>
<style>{_sheet()}</style>
</head>
<body>
<header>
<h1>{name}</h1>
<p class="lead">{escape(headline(inputs))}</p>
{_key_numbers(inputs)}
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{body}
</main>
<footer>
<h2>Files</h2>
<p>Beside this page, the same as pictures and tables: {escape(", ".join(files))}.</p>
<p>Made by qsync-opt {escape(__version__)}; problem {inputs.problem.sha256[:16]}. Times are those
of one training step; perturbation is the variance that a plan adds to the averaged gradient.</p>
</footer>
</body>
</html>
"""


def _sheet() -> str:
    def variables(mode: int) -> str:
        return " ".join(f"--{role}: {colours[mode]};" for role, colours in looks.COLOURS.items())

    return _SHEET.replace("LIGHT", variables(0)).replace("DARK", variables(1))


def _key_numbers(inputs: ReportInputs) -> str:
    """The numbers that people look for first."""
    facts: list[tuple[str, str]] = []
    if inputs.plans:
        name = next(iter(inputs.plans))
        mine = inputs.evaluations[name]
        facts.append((f"{name}: predicted step", console.seconds(mine.iteration_time_s)))
        if name in inputs.runs:
            facts.append((f"{name}: measured step", console.seconds(inputs.runs[name].step_s)))
        facts.append((f"{name}: perturbation", console.number(mine.perturbation)))
        rows = () if inputs.comparison is None else inputs.comparison.rows
        gap = next((row.gap for row in rows if row.method == name), None)
        if gap is not None:
            facts.append((f"{name}: gap to the bound", console.percent(gap)))
        rival = inputs.evaluations.get("uniform")
        if rival is not None and name != "uniform":
            facts.append(("uniform: perturbation", console.number(rival.perturbation)))
    if not facts:
        return ""
    items = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>" for what, value in facts
    )
    return f'<dl class="key">{items}</dl>'


def _section(section: Section) -> str:
    parts = [f'<section id="{section.name}">', f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.text]
    parts += [picture.html() for picture in section.pictures]
    if section.missing:
        text = _OPTION.sub(r"<code>\1</code>", escape(section.missing))
        parts.append(f'<p class="missing">{text}</p>')
    for table in section.tables:
        if section.pictures:
            title = escape(table.title)
            parts.append(f"<details><summary>Table: {title}</summary>\n{table.html()}</details>")
        else:
            parts.append(table.html())
    return "\n".join([*parts, "</section>"])
