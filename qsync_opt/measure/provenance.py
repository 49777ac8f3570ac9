"""`provenance_of`: the device and the versions that costs are measured on and with."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from datetime import datetime, timezone

import torch

from qsync_opt import __version__
from qsync_opt.costs import CostsProvenance
from qsync_opt.graph import OperatorGraph
from qsync_opt.kernels.host_library import compiled_layers


def provenance_of(graph: OperatorGraph, device: torch.device) -> CostsProvenance:
    """Where and with what versions costs are measured now."""
    cuda = device.type == "cuda"
    versions = {
        "python": platform.python_version(),
        "qsync_opt": __version__,
        "torch": str(torch.__version__),
        "layers": "Python" if compiled_layers() is None else "C++",
    }
    driver = ""
    if cuda:
        versions["cuda"] = str(torch.version.cuda)
        driver = driver_version()
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100") if cuda else "100"
    return CostsProvenance(
        device_type=device.type,
        device=torch.cuda.get_device_name(device) if cuda else processor_name(),
        threads=0 if cuda else torch.get_num_threads(),
        share=int(float(share)),
        driver=driver,
        versions=versions,
        batch=dict(graph.provenance.batch),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def processor_name() -> str:
    """The name of the processor, or its architecture where the system does not tell."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def driver_version() -> str:
    """The version of CUDA that the installed driver is for, as it numbers it; "" without one."""
    version = ctypes.c_int()
    try:
        asked = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # no driver here, or not one of NVIDIA's
        return ""
    return str(version.value) if asked == 0 else ""
