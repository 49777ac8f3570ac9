"""Small models trained at every precision keep to the curve of fp32.

The fp32 curves are golden files; `python -m tests.unit.runtime.test_training` writes them anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from qsync_opt.kernels.rounding import Rounding
from qsync_opt.precision import Precision
from tests.training_runs import STEPS, curve, tail

GOLDEN = Path(__file__).parents[2] / "golden" / "training_curves_cpu.json"

#: How far the mean loss of the last steps may lie from fp32's, as a share of what fp32 learns.
BANDS = {
    Precision.FP32: 0.005,
    Precision.TF32: 0.005,
    Precision.BF16: 0.01,
    Precision.FP16: 0.005,
    Precision.FP8: 0.015,
    Precision.INT8: 0.01,
}


@pytest.mark.parametrize("name", ["gpt", "cnn"])
@pytest.mark.parametrize("precision", Precision)
def test_training_keeps_to_the_curve_of_fp32(precision: Precision, name: str) -> None:
    golden = json.loads(GOLDEN.read_text())["curves"][name]
    learned = golden[0] - tail(golden)
    assert learned > 0.5, "the curve must fall, or a band means nothing"
    found = curve(name, precision)
    assert abs(tail(found) - tail(golden)) <= BANDS[precision] * learned
    assert found[0] == pytest.approx(golden[0], rel=0.02)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP8])
def test_training_with_stochastic_rounding_does_too(precision: Precision) -> None:
    steps = STEPS // 2
    golden = json.loads(GOLDEN.read_text())["curves"]["gpt"][:steps]
    learned = golden[0] - tail(golden)
    found = curve("gpt", precision, Rounding.STOCHASTIC, steps=steps)
    assert abs(tail(found) - tail(golden)) <= BANDS[precision] * learned
    assert found[:5] == curve("gpt", precision, Rounding.STOCHASTIC, steps=5)


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_the_bands_see_a_change_of_the_training(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())["curves"][name]
    slower = curve(name, None, learning_rate=0.25)
    widest = max(BANDS.values())
    assert abs(tail(slower) - tail(golden)) > widest * (golden[0] - tail(golden))


def write() -> None:
    """Write the golden curves of the models as they are, on this CPU."""
    curves = {name: [float(f"{loss:.6g}") for loss in curve(name, None)] for name in ("gpt", "cnn")}
    origin = {
        "what": "training loss of the small models of tests/low_precision.py in fp32",
        "written_by": "python -m tests.unit.runtime.test_training",
        "torch": torch.__version__,
        "device": "cpu",
        "steps": STEPS,
    }
    GOLDEN.write_text(json.dumps({**origin, "curves": curves}) + "\n")


if __name__ == "__main__":
    write()
    if "--show" in sys.argv:
        golden = json.loads(GOLDEN.read_text())["curves"]
        for name in ("gpt", "cnn"):
            base, end = golden[name][0], tail(golden[name])
            for precision in Precision:
                found = tail(curve(name, precision))
                sys.stdout.write(f"{name} {precision} {(found - end) / (base - end):+.4f}\n")
            slow = tail(curve(name, None, learning_rate=0.25))
            sys.stdout.write(f"{name} slow {(slow - end) / (base - end):+.4f}\n")
