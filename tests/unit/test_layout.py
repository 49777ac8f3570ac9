"""Imports point downwards, heavy ones stay where they belong, and the package loads lazily."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qsync_opt

PACKAGE = Path(qsync_opt.__file__).parent
ROOT = "qsync_opt"

#: From the bottom up. A module may import modules of lower lines only, not of its own line.
LAYERS = (
    ("errors", "precision"),
    # the data
    ("plan", "strict_json", "optimize.arrays", "optimize.canonical"),
    ("calibration", "optimize.buckets", "optimize.fields"),
    ("optimize.tensors",),
    ("costs_checks", "gradient_noise"),
    ("costs_network",),
    ("graph", "perturbation", "costs", "optimize.problem"),
    ("graph_validation",),
    ("optimize.device_validation",),
    ("optimize.validation",),
    ("schema", "graph_schema", "costs_schema"),
    ("conversion", "graph_conversion", "costs_conversion", "perturbation_file"),
    ("files",),
    # kernels
    ("kernels.rounding", "kernels.build"),
    (
        "kernels.checks",
        "kernels.reference",
        "kernels.registry",
        "kernels.native",
        "kernels.host_library",
    ),
    ("kernels.shared_memory",),
    ("kernels.bucket_reference",),
    ("kernels.launch",),
    ("kernels.products", "kernels.bucket_launch"),
    ("kernels.library",),
    ("kernels.bucket_library",),
    # layers
    ("runtime.fp32", "runtime.host_memory", "runtime.once"),
    ("runtime.arithmetic", "runtime.availability", "runtime.casts"),
    ("runtime.products", "runtime.product_check"),
    ("runtime.batched", "runtime.convolutions", "runtime.session"),
    ("runtime.operators",),
    ("runtime.functions", "runtime.layers"),
    ("runtime.calls",),
    ("runtime.targets",),
    ("runtime.assignment",),
    ("runtime.convert",),
    # ranks, and what they keep
    ("runtime.distributed", "runtime.interruption", "runtime.checkpoints", "runtime.metrics"),
    ("runtime.agreement", "runtime.state", "runtime.launch"),
    ("runtime.scaling",),
    # what ranks send
    ("runtime.communication", "runtime.levels", "runtime.host_reduction"),
    ("runtime.shared_reduction",),
    ("runtime.bucket_bits", "runtime.bucket_codec"),
    ("runtime.fsdp_collectives", "runtime.shards", "runtime.two_phase"),
    ("runtime.quantized_comm", "runtime.quantized_sharding"),
    ("runtime.sharded_model",),
    ("runtime.parameters",),
    # what a model does, and what that takes
    ("measure.calls", "measure.step", "measure.clock", "measure.notebook"),
    ("measure.model_file", "measure.probe", "measure.operands"),
    ("measure.communication", "measure.memory", "measure.records", "measure.casts"),
    ("measure.provenance",),
    ("measure.values", "measure.naming", "measure.roles", "measure.rounding_noise"),
    ("measure.draws",),
    ("measure.recorder", "measure.autograd_graph", "measure.flows"),
    ("measure.attribution", "measure.taps", "measure.kinks"),
    ("measure.assembly", "measure.moments"),
    ("measure.capture", "measure.indicators", "measure.variance", "measure.execution"),
    ("measure.operators", "measure.ground_truth", "measure.uniform", "measure.gradients"),
    ("measure.survey",),
    ("measure.measuring", "measure.sensitivity"),
    ("device_memory",),
    ("device_tables",),
    ("build_codes",),
    ("build",),
    # what a plan costs, and what is asked and answered
    ("optimize.evaluate",),
    ("optimize.linear", "optimize.ticks", "optimize.elimination"),
    ("optimize.cuts",),
    ("optimize.labels", "optimize.exchange"),
    ("optimize.relaxation",),
    ("optimize.knapsack",),
    ("optimize.workers", "optimize.processes", "optimize.interrupter"),
    ("optimize.generate", "optimize.result", "optimize.rows", "optimize.choices"),
    ("optimize.comparison", "optimize.incumbent"),
    # what a step will be like
    ("simulate.tasks", "simulate.memory"),
    ("simulate.replay", "simulate.paths"),
    ("hosts",),
    ("simulate.trace",),
    # the methods
    ("optimize.consistency", "optimize.explanation", "optimize.factors", "optimize.state"),
    ("optimize.floors",),
    ("optimize.brute_force", "optimize.byte_rows", "optimize.bit_columns"),
    ("optimize.kind_program",),
    ("optimize.formulation",),
    ("optimize.baselines", "optimize.ladders"),
    ("optimize.greedy", "optimize.polish"),
    # programs in files, and the solvers
    ("optimize.mps_names",),
    ("optimize.mps", "optimize.mps_solution"),
    ("optimize.mps_reader", "optimize.cbc"),
    ("optimize.backends",),
    ("optimize.climb", "optimize.minima"),
    ("optimize.lagrangian",),
    ("optimize.core", "optimize.moves"),
    ("optimize.branching", "optimize.proposals", "optimize.proof"),
    ("optimize.core_labels",),
    ("optimize.cores", "optimize.starts"),
    ("optimize.exact",),
    ("optimize.kind",),
    ("optimize.crew",),
    ("optimize.run",),
    # bits beside precisions
    ("optimize.bits", "optimize.joint_incumbent", "optimize.joint_lagrangian"),
    ("optimize.bucket_groups",),
    ("optimize.joint_core", "optimize.joint_vectors"),
    ("optimize.joint_alone", "optimize.joint_listing"),
    ("optimize.joint_apart", "optimize.joint_branching", "optimize.joint_program"),
    ("optimize.joint_search",),
    ("optimize.bits_run",),
    ("optimize.solve",),
    ("replayed_kind",),
    ("replayed_run",),
    ("replayed_bits",),
    ("replayed",),
    # questions about a problem
    ("optimize.compare", "optimize.explain", "optimize.export"),
    ("optimize.refresh",),
    # training
    ("runtime.batches", "runtime.lost_ranks", "runtime.patching", "runtime.labels"),
    ("runtime.plan_bits",),
    ("runtime.passes", "runtime.keeper"),
    ("runtime.batch_sizing", "runtime.steps", "runtime.refinement"),
    ("runtime.preparation",),
    ("runtime.tracing",),
    ("runtime.trainer",),
    # what people see
    ("console", "options", "measured_costs"),
    ("report.looks", "report.measured", "report.tables"),
    ("report.inputs", "report.picture"),
    ("report.precision_map", "report.timelines", "report.memory_chart", "report.pareto_chart"),
    ("report.plan_tables", "report.training_charts"),
    ("report.sections",),
    ("report.page",),
    ("report.writing",),
    ("report",),
    ("commands",),
    ("model_commands", "problem_commands", "replay_commands"),
    ("cost_commands", "build_commands", "train_commands", "report_commands", "calibrate_commands"),
    ("demo.devices", "demo.group", "demo.lines", "demo.tasks"),
    ("demo.preparation", "demo.training"),
    ("demo.pipeline",),
    ("demo_commands",),
    ("cli",),
)
LEVEL = {f"{ROOT}.{name}": level for level, names in enumerate(LAYERS) for name in names}

#: Upward imports made on purpose: (module, imported module) -> why.
ALLOWED = {
    (f"{ROOT}.optimize.problem", f"{ROOT}.optimize.validation"): (
        "an AllocationProblem validates itself on construction, and the one validation"
        " function reads its classes; the import stands inside __post_init__"
    ),
    (f"{ROOT}.graph", f"{ROOT}.graph_validation"): "the same for an OperatorGraph",
}

#: Heavy or special packages -> the folders (or modules) of the package that may import them.
HOMES = {
    "ortools": ("optimize",),
    "pulp": ("optimize",),
    "scipy": ("optimize", "measure"),
    "torch": (
        "measure",
        "kernels",
        "runtime",
        "demo",
        "model_commands",
        "cost_commands",
        "train_commands",
    ),
    "matplotlib": ("report",),
    "rich": ("console",),
}
FORBIDDEN = ("pickle", "marshal", "shelve", "dill", "highspy", "pyscipopt", "networkx")


def module_names() -> dict[str, Path]:
    """Every module of the package by its dotted name, packages without `.__init__`."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = module_names()


def imports_of(source: str, modules: dict[str, Path]) -> set[str]:
    """What a source imports when it runs, inside functions too, but not for type checking."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children = list(node.orelse)
        for child in children:
            yield from walk(child)

    found: set[str] = set()
    for node in walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            assert node.module is not None
            for alias in node.names:  # `from package import module` means the module
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found


IMPORTS = {name: imports_of(path.read_text(), MODULES) for name, path in MODULES.items()}
INTERNAL = {
    name: {other for other in imports if other in MODULES and other != ROOT}
    for name, imports in IMPORTS.items()
}


def upward_edges(internal: dict[str, set[str]], level: dict[str, int]) -> list[tuple[str, str]]:
    return [
        (name, other)
        for name, others in sorted(internal.items())
        for other in sorted(others)
        if name in level and other in level and level[other] >= level[name]
    ]


def reached_from(module: str) -> set[str]:
    """The modules of the package that a module imports, directly or not."""
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        for other in INTERNAL[waiting.pop()] - reached:
            reached.add(other)
            waiting.append(other)
    return reached


def test_the_walker_sees_every_form_of_import() -> None:
    source = (
        "import a.b\nfrom c import d, e\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import unseen\nelse:\n    import f\n"
        "def g():\n    import h\n    from pkg import mod\n"
    )
    expected = {"a.b", "c", "typing", "f", "h", "pkg.mod"}
    assert imports_of(source, {"pkg.mod": PACKAGE}) == expected


def test_the_check_sees_an_upward_edge() -> None:
    level = {"low": 0, "high": 1, "peer": 1}
    assert upward_edges({"low": {"high"}, "high": {"low"}, "peer": {"high"}}, level) == [
        ("low", "high"),
        ("peer", "high"),
    ]


def test_every_module_has_a_layer() -> None:
    missing = []
    for name, path in MODULES.items():
        if path.name != "__init__.py" and name not in LEVEL:
            below = sorted(INTERNAL[name], key=lambda other: LEVEL.get(other, 0))
            missing.append(f"{name} (above {below[-1] if below else 'nothing'})")
    assert not missing, f"place in LAYERS: {missing}"


def test_imports_point_downwards() -> None:
    wrong = [edge for edge in upward_edges(INTERNAL, LEVEL) if edge not in ALLOWED]
    assert not wrong, f"upward imports: {wrong}"


def test_every_exception_is_still_needed() -> None:
    assert set(ALLOWED) <= set(upward_edges(INTERNAL, LEVEL))


@pytest.mark.parametrize("package", sorted(HOMES))
def test_heavy_packages_stay_at_home(package: str) -> None:
    homes = tuple(f"{ROOT}.{home}" for home in HOMES[package])
    strangers = [
        name
        for name, imports in IMPORTS.items()
        if any(other.split(".")[0] == package for other in imports)
        and not any(name == home or name.startswith(f"{home}.") for home in homes)
    ]
    assert not strangers, f"only {homes} may import {package}"


def test_forbidden_packages_are_not_imported() -> None:
    used = [
        (name, other)
        for name, imports in IMPORTS.items()
        for other in imports
        if other.split(".")[0] in FORBIDDEN
    ]
    assert not used


def test_evaluate_shares_no_code_with_the_programs_it_judges() -> None:
    reached = reached_from(f"{ROOT}.optimize.evaluate")
    assert f"{ROOT}.optimize.problem" in reached
    assert reached.isdisjoint({f"{ROOT}.optimize.formulation", f"{ROOT}.optimize.linear"})


def test_only_the_command_line_writes_output() -> None:
    allowed = {f"{ROOT}.console", f"{ROOT}.cli"}
    writers = []
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            printed = isinstance(node, ast.Name) and node.id == "print"
            stream = isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr")
            of_sys = stream and ast.unparse(node).startswith("sys.")
            if printed or (of_sys and name not in allowed):
                writers.append((name, getattr(node, "lineno", 0)))
    assert not writers


@pytest.mark.parametrize("start", ["import qsync_opt", "from qsync_opt.cli import main"])
def test_starting_is_light(start: str) -> None:
    heavy = ("numpy", "scipy", "ortools", "pulp", "torch", "rich", "matplotlib", "msgspec")
    code = f"import sys; {start}; sys.stdout.write(','.join(set(sys.modules) & set({heavy!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert done.stdout == ""
