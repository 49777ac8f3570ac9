"""`capture`: one real training step of a model as an `OperatorGraph`.

The model, its gradients, its buffers and the random number generators are left as they were.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn

from qsync_opt import __version__
from qsync_opt.errors import CaptureError, QsyncError
from qsync_opt.graph import GraphProvenance, OperatorGraph
from qsync_opt.measure.assembly import Assembly
from qsync_opt.measure.autograd_graph import AutogradGraph
from qsync_opt.measure.probe import Probe
from qsync_opt.measure.recorder import Recorder, recomputation, sequence_number
from qsync_opt.measure.step import Loss, call_model, leaves, loss_of, split_batch

#: A graph that explains less of the step's time is refused.
LEAST_COVERAGE = 0.95

#: Functions that hold several matrix products are opened, and so may be those inside.
_MOST_ROUNDS = 5


def capture(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    *,
    name: str | None = None,
    source: str | None = None,
    sizes: Mapping[str, object] | None = None,
    least_coverage: float = LEAST_COVERAGE,
) -> OperatorGraph:
    """Run training steps of a model and record the last one.

    Args:
        model: in fp32, on one device, in the mode it is trained in.
        batch: what forward takes; with a loss, the pair `(inputs, target)` (see `step`).
        loss: `loss(output, target)` gives a scalar; None if the model returns its loss.
        name: of the graph; default: the class of the model.
        source: the model file, for the provenance; default: the class of the model.
        sizes: what the model was built with, for the provenance.
        least_coverage: refuse a graph that explains less of the step's time (0 to 1).

    Raises:
        CaptureError: the step fails, or does what a graph cannot describe, or too little of
            its time is explained.
    """
    device = device_of(model, batch)
    _check_model(model)
    inputs, target = split_batch(batch, loss)
    tensors = dict(leaves(batch))
    probe = Probe(device)
    to_open: frozenset[str] = frozenset()
    with left_as_found(model, device):
        # The first rounds warm the device up and find the functions to open.
        for number in range(_MOST_ROUNDS):
            recorder = Recorder(model, tensors, device, to_open, probe if number else None)
            assembly = _run_step(recorder, model, inputs, target, loss, device)
            if number and not recorder.to_open - to_open:
                break
            to_open |= recorder.to_open
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        graph = assembly.graph(
            name or type(model).__name__,
            _provenance(source or kind, sizes or {}, tensors, device),
            sum(t.numel() * t.element_size() for t in tensors.values()),
        )
    _check_coverage(graph, least_coverage)
    return graph


def _run_step(
    recorder: Recorder,
    model: nn.Module,
    inputs: Any,
    target: Any,
    loss: Loss | None,
    device: torch.device,
) -> Assembly:
    """One step under the recorder."""
    for parameter in model.parameters():
        parameter.grad = None
    with torch.enable_grad():
        try:
            with recorder.forward():
                output = call_model(model, inputs)
                with recorder.loss():
                    value = loss_of(output, target, loss)
        except Exception as error:
            raise _failure("forward", error) from error
        if not bool(torch.isfinite(value.detach()).all()):
            raise CaptureError(
                f"the loss is {float(value.detach())}",
                "Check the batch: labels out of range and empty masks are the usual reasons",
            )
        loss_value = recorder.tensors.resolve(value)
        autograd = AutogradGraph(value, model)
        before = sequence_number()
        try:
            start = torch.ones_like(value)
            with recorder.backward_pass(autograd.finished):
                torch.autograd.backward(value, start)
        except Exception as error:
            raise _failure("backward", error) from error
        finally:
            autograd.close()
    # On a GPU the backward has a thread, and with it a count of nodes, of its own.
    if recorder.recomputes or sequence_number() != before:
        raise recomputation("a part of the model")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Assembly(recorder, autograd, model, loss_value)


def _failure(part: str, error: Exception) -> Exception:
    if isinstance(error, QsyncError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return CaptureError(
            f"the {part} ran out of memory: {_first_line(error)}",
            "Capture with a smaller batch; costs are measured for the batch of the graph",
        )
    return CaptureError(
        f"the {part} of the model fails on the batch: {type(error).__name__}: {_first_line(error)}",
        "Check that the batch fits the model; run model(batch) alone to see the whole traceback",
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"


@contextmanager
def left_as_found(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put gradients, buffers and random number generators back at the end."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, content in buffers:
                    buffer.copy_(content)


def device_of(model: nn.Module, batch: Any) -> torch.device:
    """The one device that everything is on.

    Raises:
        CaptureError: no parameters, no tensors in the batch, or several devices.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is a {type(model).__name__}", "Give a torch.nn.Module")
    places = {str(parameter.device) for parameter in model.parameters()}
    if not places:
        raise CaptureError("the model has no parameters", "Give a model that can be trained")
    given = {str(tensor.device) for _, tensor in leaves(batch)}
    if not given:
        raise CaptureError("the batch holds no tensor", "Give what forward takes, as tensors")
    if len(places | given) > 1:
        raise CaptureError(
            f"model and batch are on {', '.join(sorted(places | given))}",
            "Move all of them to one device",
        )
    device = next(model.parameters()).device
    if device.type not in ("cpu", "cuda"):
        raise CaptureError(
            f"the model is on {device}", "Move model and batch to a CPU or a CUDA device"
        )
    return device


def _check_model(model: nn.Module) -> None:
    """Refuse what would hide the operators or the names of a model."""
    wrapper = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(f"the model is a {wrapper}", "Capture the module it was made from")
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod"):
            raise CaptureError(
                f"{name or 'the model'} is compiled, which hides its operators",
                "Capture the model before torch.compile",
            )
    if hasattr(model, "module") and hasattr(model, "require_forward_param_sync"):
        raise CaptureError(f"the model is wrapped in {wrapper}", "Capture model.module")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype is not torch.float32:
            raise CaptureError(
                f"parameter {name} is trained in {parameter.dtype}; the parameters stay in"
                " float32 and the precision lives inside the operators",
                "Call model.float() first",
            )


def _check_coverage(graph: OperatorGraph, least: float) -> None:
    coverage = graph.coverage
    if coverage.share >= least:
        return
    total = coverage.forward_s + coverage.backward_s
    parts = [f"{what} {seconds / total:.1%}" for what, seconds in coverage.missing.items()]
    raise CaptureError(
        f"the graph explains {coverage.share:.1%} of the step's time and must explain"
        f" {least:.0%}; missing: {', '.join(parts[:5])}",
        "Write these parts with torch functions, or register them with torch.library",
    )


def _provenance(
    source: str, sizes: Mapping[str, object], tensors: Mapping[str, Tensor], device: torch.device
) -> GraphProvenance:
    cuda = device.type == "cuda"
    versions = {
        "python": platform.python_version(),
        "qsync_opt": __version__,
        "torch": str(torch.__version__),
    }
    if cuda and torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    batch = {
        path: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        for path, tensor in tensors.items()
    }
    return GraphProvenance(
        model=source,
        sizes={key: str(value) for key, value in sizes.items()},
        batch=batch,
        device_type=device.type,
        device=torch.cuda.get_device_name(device) if cuda else platform.machine(),
        versions=versions,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
