"""ResNet-18 and ResNet-50 with the per-layer figures that HAWQ-V3 published for a T4.

Source of the numbers: Zhen-Dong/HAWQ, file ILP.ipynb (MIT licence), commit
87ad098c0f1d66472d1159b0876033997da23fee; paper: Yao et al., HAWQ-V3, arXiv 2011.10680. The
first and last layers are left out there and run at 8 bits always. Latencies are in
milliseconds, measured by the authors on a T4; the sensitivity of a layer is the mean Hessian
trace times the squared weight error.

The formats of this library have no int4, so the two columns are stand-ins: `bf16` holds the
published INT8 figures (the wide option) and `int8` the published INT4 figures (the narrow one).

The notebook limits latency, size and bit operations one at a time; here latency (as the
deadline) and size (as memory) hold together, both half way between all-narrow and all-wide.
A layer shares its width with the skip convolution beside it, as the notebook's equations say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from problems.convolutional import resnet18, resnet50
from qsync_opt.optimize.problem import (
    AllocationProblem,
    CastTensors,
    DeviceKind,
    Operator,
    SavedTensors,
)
from qsync_opt.precision import Precision

if TYPE_CHECKING:
    from problems.shapes import Layer, Network

SOURCE = (
    "Zhen-Dong/HAWQ (MIT), ILP.ipynb at 87ad098c0f1d66472d1159b0876033997da23fee;"
    " HAWQ-V3, arXiv 2011.10680"
)
WIDE, NARROW = Precision.BF16, Precision.INT8
#: Half way between all-narrow and all-wide, the notebook's own setting.
_LEVEL = 0.5


@dataclass(frozen=True, kw_only=True)
class Published:
    """The figures of one network, one entry per layer in forward order.

    Attributes:
        trace: mean Hessian trace of the layer's weights.
        error_8, error_4: squared error of its weights at 8 and 4 bits.
        parameters: elements of its weight.
        latency_8_ms, latency_4_ms: milliseconds on a T4 at 8 and 4 bits.
        tied: pairs of layers that share a width.
    """

    trace: Sequence[float]
    error_8: Sequence[float]
    error_4: Sequence[float]
    parameters: Sequence[int]
    latency_8_ms: Sequence[float]
    latency_4_ms: Sequence[float]
    tied: Sequence[tuple[int, int]]


# fmt: off
RESNET18 = Published(
    trace=(
        0.06857826, 0.03162379, 0.03298575, 0.01205663, 0.02222431, 0.00596336, 0.06931772,
        0.00807129, 0.00372905, 0.00530698, 0.00209011, 0.00737569, 0.00210454, 0.00151197,
        0.00158041, 0.00078146, 0.00451841, 0.00098745, 0.00072944,
    ),
    error_8=(
        0.0235, 0.0125, 0.0102, 0.0082, 0.0145, 0.0344, 0.0023, 0.0287, 0.0148, 0.0333, 0.0682,
        0.0027, 0.0448, 0.0336, 0.0576, 0.1130, 0.0102, 0.0947, 0.0532,
    ),
    error_4=(
        6.7430, 3.9691, 3.3281, 2.6796, 4.7277, 10.5966, 0.6827, 9.0942, 4.8857, 10.7599,
        21.7546, 0.8603, 14.5324, 10.9651, 18.7706, 36.4044, 3.1572, 29.6994, 17.4016,
    ),
    parameters=(
        36864, 36864, 36864, 36864, 73728, 147456, 8192, 147456, 147456, 294912, 589824, 32768,
        589824, 589824, 1179648, 2359296, 131072, 2359296, 2359296,
    ),
    latency_8_ms=(
        0.36189111, 0.36211718, 0.31141909, 0.30454471, 0.19184896, 0.38948934, 0.0334169,
        0.38904905, 0.3892859, 0.19134735, 0.34307431, 0.02802354, 0.34313329, 0.34310756,
        0.21117103, 0.37376585, 0.02896843, 0.37398187, 0.37405185,
    ),
    latency_4_ms=(
        0.21094404, 0.21092674, 0.21104113, 0.21086851, 0.13642465, 0.19167506, 0.02532183,
        0.19148203, 0.19142914, 0.11395316, 0.20556011, 0.01917474, 0.20566918, 0.20566509,
        0.13185102, 0.22287786, 0.01790088, 0.22304611, 0.22286099,
    ),
    tied=((4, 6), (9, 11), (14, 16)),
)

RESNET50 = Published(
    trace=(
        0.19270050525665214, 0.026702478528024147, 0.09448622912168206, 0.07639402896166123,
        0.009688886813818761, 0.006711237132549379, 0.024378638714551495, 0.011769247241317709,
        0.00250671175308565, 0.008039989508690044, 0.008477769792080075, 0.0017263438785415808,
        0.00313899479806392, 0.004365175962448905, 0.0015507987700405636, 0.0015619333134963605,
        0.002701229648662333, 0.002383587881922602, 0.0010320576839146385, 0.0025724433362483905,
        0.0046385480090998495, 0.0008540530106982067, 0.003809824585913301, 0.0019535077735770134,
        0.0005609235377052988, 0.0018696154002090816, 0.0016933275619534234, 0.000607571622821307,
        0.00044498199713291893, 0.0008382285595869651, 0.0006031448720029394,
        0.0003951200051233584, 0.000718781026080718, 0.0008380718063555912,
        0.00037973490543638077, 0.000828751828521126, 0.0013068615226087446,
        0.0004476536996660732, 0.0012669296702365405, 0.0013098433846609064,
        0.00032695921254355777, 0.0012137993471687096, 0.0010635341750463423,
        0.0002480300900066659, 0.0005943655269220451, 0.0007215500227179646, 0.000612712872680123,
        0.00025412911781990733, 0.0005049526807847556, 0.0007025265367691074,
        0.0002485941222403296, 0.000525604293216296,
    ),
    error_8=(
        0.0031, 0.0025, 0.0123, 0.0025, 0.0024, 0.0062, 0.0019, 0.0023, 0.0030, 0.0010, 0.0140,
        0.0052, 0.0204, 0.0054, 0.0064, 0.0141, 0.0041, 0.0067, 0.0094, 0.0029, 0.0103, 0.0095,
        0.0030, 0.0243, 0.0140, 0.0371, 0.0131, 0.0144, 0.0270, 0.0078, 0.0147, 0.0192, 0.0066,
        0.0162, 0.0210, 0.0063, 0.0161, 0.0169, 0.0054, 0.0194, 0.0241, 0.0061, 0.0436, 0.0267,
        0.0551, 0.0217, 0.0533, 0.0589, 0.0212, 0.0562, 0.0392, 0.0246,
    ),
    error_4=(
        0.9257, 0.6624, 3.4605, 0.7805, 0.8040, 2.0657, 0.5947, 0.7596, 0.9826, 0.3381, 4.0922,
        1.5506, 6.0288, 1.7186, 2.0701, 4.6080, 1.3128, 2.1613, 3.0710, 0.9209, 3.2794, 3.0883,
        0.9841, 7.7154, 4.3872, 11.7131, 4.1949, 4.6766, 8.7215, 2.5369, 4.8132, 6.1627, 2.1765,
        5.2257, 6.7500, 2.0171, 5.2612, 5.5459, 1.7509, 6.2498, 7.4798, 1.9959, 13.8412, 8.3407,
        18.0200, 6.9997, 15.3605, 17.5150, 6.4017, 16.0258, 10.7682, 8.0800,
    ),
    parameters=(
        4096, 36864, 16384, 16384, 16384, 36864, 16384, 16384, 36864, 16384, 32768, 147456, 65536,
        131072, 65536, 147456, 65536, 65536, 147456, 65536, 65536, 147456, 65536, 131072, 589824,
        262144, 524288, 262144, 589824, 262144, 262144, 589824, 262144, 262144, 589824, 262144,
        262144, 589824, 262144, 262144, 589824, 262144, 524288, 2359296, 1048576, 2097152,
        1048576, 2359296, 1048576, 1048576, 2359296, 1048576,
    ),
    latency_8_ms=(
        0.07079369, 0.36040637, 0.27649506, 0.276513, 0.1611783, 0.36101955, 0.276361, 0.16111273,
        0.36064923, 0.24884412, 0.07218692, 0.34899773, 0.19600394, 0.29505887, 0.16074604,
        0.34904888, 0.19603683, 0.16067593, 0.34919751, 0.1960506, 0.16089535, 0.34916001,
        0.19616036, 0.08172319, 0.33166738, 0.15534599, 0.30712053, 0.15510333, 0.33172639,
        0.15541728, 0.15290036, 0.3317953, 0.15551916, 0.15252759, 0.33165544, 0.15529572,
        0.15229388, 0.33187364, 0.15545004, 0.15275891, 0.33161443, 0.15566678, 0.08390548,
        0.33057286, 0.15200003, 0.33919933, 0.16635967, 0.33092922, 0.15179218, 0.16672966,
        0.33086648, 0.1519619,
    ),
    latency_4_ms=(
        0.07018191, 0.22481827, 0.27510223, 0.27512618, 0.10512171, 0.22473146, 0.21536969,
        0.10506169, 0.22481533, 0.18938694, 0.05091347, 0.19677368, 0.15108796, 0.16824758,
        0.0848311, 0.19684267, 0.15120609, 0.08481235, 0.19667935, 0.15121574, 0.08476754,
        0.19673882, 0.15123765, 0.04866963, 0.20606097, 0.10150094, 0.169953, 0.09355929,
        0.20598819, 0.10146334, 0.09362463, 0.20609737, 0.10188489, 0.09360134, 0.20618122,
        0.10150974, 0.09352375, 0.20603792, 0.1015803, 0.09365549, 0.20599906, 0.10143032,
        0.08047627, 0.207775, 0.08819472, 0.17924989, 0.10268331, 0.20780669, 0.08795617,
        0.10265705, 0.20781191, 0.08793056,
    ),
    tied=((0, 3), (10, 13), (23, 26), (42, 45)),
)
# fmt: on


def inner_convolutions(network: Network) -> list[Layer]:
    """The convolutions that HAWQ-V3 decides on: all but the first."""
    return [layer for layer in network.layers if layer.kind == "conv2d"][1:]


def hawq_resnet18() -> AllocationProblem:
    """HAWQ-V3's ResNet-18: 19 layers, two widths."""
    return _problem("hawq-v3-resnet18-t4", resnet18(1), RESNET18)


def hawq_resnet50() -> AllocationProblem:
    """HAWQ-V3's ResNet-50: 52 layers, two widths."""
    return _problem("hawq-v3-resnet50-t4", resnet50(1), RESNET50)


def _problem(name: str, network: Network, published: Published) -> AllocationProblem:
    layers = inner_convolutions(network)
    wide_s = [value / 1000 for value in published.latency_8_ms]
    narrow_s = [value / 1000 for value in published.latency_4_ms]
    pairs = zip(published.trace, published.error_8, published.error_4, strict=True)
    noise = [[trace * error_8, trace * error_4] for trace, error_8, error_4 in pairs]
    total = sum(published.parameters)
    low_s, high_s = sum(narrow_s), sum(wide_s)
    latency = [list(row) for row in zip(wide_s, narrow_s, strict=True)]
    count = len(layers)
    return AllocationProblem(
        name=name,
        provenance=(
            f"{network.name}, inner layers, T4. {SOURCE}. Columns are stand-ins: bf16 = the"
            " published INT8, int8 = the published INT4 (the format has no int4). Latency is"
            " all forward; the size limit is the memory limit (a weight is a saved tensor);"
            " both limits half way between all-narrow and all-wide; perturbation = mean Hessian"
            " trace x squared weight error."
        ),
        precisions=(WIDE, NARROW),
        storage=(WIDE, NARROW),
        output=(WIDE, WIDE),
        operators=tuple(Operator(name=layer.name, kind="conv2d") for layer in layers),
        buckets=(),
        groups=tuple((layers[a].name, layers[b].name) for a, b in published.tied),
        devices=(
            DeviceKind(
                name="t4",
                workers=1,
                batch_share=1.0,
                # One byte a weight at 8 bits, half a byte at 4.
                memory_bytes=total // 2 + int((total - total // 2) * _LEVEL),
                fixed_bytes=0,
                optimizer_s=0.0,
                available=[[True, True]] * count,  # type: ignore[arg-type]
                forward_s=latency,  # type: ignore[arg-type]
                backward_s=[[0.0, 0.0]] * count,  # type: ignore[arg-type]
                perturbation=noise,  # type: ignore[arg-type]
                tensors=CastTensors.from_rows(
                    producer=[], consumers=[], forward_s=[], backward_s=[]
                ),
                saved=SavedTensors.from_rows(
                    savers=[[index] for index in range(count)],
                    size_bytes=[[size, size // 2] for size in published.parameters],
                    dtypes=(WIDE, NARROW),
                ),
            ),
        ),
        deadline_s=low_s + (high_s - low_s) * _LEVEL,
    )
