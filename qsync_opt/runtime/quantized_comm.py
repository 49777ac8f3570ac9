"""Coded gradients under `DistributedDataParallel`: its communication hook.

Per DDP bucket, what is coded is averaged in two phases (see `two_phase`), and norms, biases and
small tensors ride along as they are. A bucket with a NaN or an infinity on any rank comes back
with NaN on every rank, so that ranks leave out the step together.

On a GPU a bucket's work is queued on a stream of its own. On a CPU, where a collective must be
waited for, the second phase of a bucket starts when the next bucket is ready: all ranks start
their collectives in the same order, and the first phase overlaps with the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from qsync_opt.errors import ParameterError
from qsync_opt.runtime.bucket_codec import CODED_DTYPES, exempt_parameters, put, spans_of, take
from qsync_opt.runtime.communication import Communication
from qsync_opt.runtime.two_phase import Averaging, Exchange, Memory

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_CAST_HOOKS: Mapping[str, Any] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}

#: Names of a bucket's tensors in `GradientHook.state`.
_PARTS = ("table", "first", "second")


def compress_gradients(
    model: DistributedDataParallel, communication: Communication, *, seed: int = 0
) -> GradientHook | None:
    """Register a hook that codes or casts the gradients of a model before they are sent.

    Call it once, before the first backward, on every rank with the same options. Weights are
    not sent by DDP: `communication.weights` must be None.

    Args:
        model: its process group must be of NCCL for parameters on GPUs, of gloo for others.
        communication: what is sent.
        seed: of the random bits, the same on all ranks.

    Returns:
        The hook; None where gradients are cast, or sent as they are.

    Raises:
        ParameterError: weights are to be coded.
        TrainError: ranks do not agree.
    """
    if communication.weights is not None:
        rule = "must leave weights alone: DDP keeps whole ones on every rank and sends none"
        remedy = "Shard the model and use quantize_sharding, or code gradients only"
        raise ParameterError("communication, weights", rule, str(communication), remedy)
    group: Any = model.process_group
    if communication.cast is not None:
        cast = _CAST_HOOKS[communication.cast]
        model.register_comm_hook(None, lambda state, bucket: cast(group, bucket))
        return None
    if communication.gradients is None:
        return None
    hook = GradientHook(model.module, communication, Exchange(group), seed)
    # DDP looks at annotations and takes no text for them; a lambda has none.
    model.register_comm_hook(None, lambda state, bucket: hook.reduce(bucket))
    return hook


class _Bucket:
    """What is known of a DDP bucket.

    Attributes:
        members: identities of its parameters: DDP forms buckets anew after the first backward.
        coded: where coded values lie.
        exact: where the others lie.
        memory: see `Memory`.
    """

    def __init__(
        self, members: tuple[int, ...], coded: list[slice], exact: list[slice], memory: Memory
    ) -> None:
        self.members = members
        self.coded = coded
        self.exact = exact
        self.memory = memory


class GradientHook:
    """Averages the gradients of DDP's buckets; see `compress_gradients`.

    Attributes:
        step: of training, which the random bits depend on; counts by itself.
        exchange: of the ranks, with the bytes that this one sent.
    """

    def __init__(
        self, model: nn.Module, communication: Communication, exchange: Exchange, seed: int
    ) -> None:
        if communication.gradients is None:
            raise ParameterError("communication, gradients", "must be coded", None)
        self.step = 0
        self.exchange = exchange
        self._scale = 1.0
        self._averaging = Averaging(
            exchange=exchange,
            coding=communication.gradients,
            bucket_size=communication.bucket_size,
            seed=seed,
        )
        # Parameters live as long as the model, so their identities stay theirs.
        self._exempt = {id(p) for p in exempt_parameters(model, communication.bucket_size)}
        self._model = model
        self._buckets: dict[int, _Bucket] = {}
        self._loaded: dict[int, Memory] = {}
        self._waiting: list[tuple[Iterator[Any], Any, Future[Tensor], Tensor]] = []
        self._streams: dict[torch.device, Any] = {}
        coding = communication.gradients
        sizes = [p.numel() for p in model.parameters() if p.requires_grad]
        facts = [coding.bits, coding.learned, coding.feedback, communication.bucket_size, seed]
        facts = [int(fact) & 0x7FFFFFFFFFFFFFFF for fact in (*facts, len(sizes), *sizes)]
        device = next(model.parameters()).device
        exchange.require_equal(facts, device, "how gradients are sent")

    def begin(self, step: int, scale: float = 1.0) -> None:
        """Say which step comes next, and by what its loss is multiplied.

        Without it steps count from 0, and the loss must always be scaled alike.
        """
        if scale != self._scale:
            for bucket in self._buckets.values():
                for lost in (bucket.memory.first, bucket.memory.second):
                    if lost is not None:
                        lost.mul_(scale / self._scale)
        self.step, self._scale = step, scale

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Average a `GradBucket`; what DDP calls."""
        buffer: Tensor = bucket.buffer()
        if buffer.layout is not torch.strided:
            rule = "must be dense: a sparse gradient cannot be coded"
            raise ParameterError("gradients", rule, buffer.layout, "Build layers with sparse=False")
        index: int = bucket.index()
        if index == 0:
            self._waiting.clear()  # of a backward that broke off
        is_last: bool = bucket.is_last()
        if self.exchange.world == 1:
            future: Future[Tensor] = Future()
            future.set_result(buffer)
        else:
            work = self._average(buffer, self._known(bucket, buffer), index)
            if buffer.is_cuda:
                future = self._queue(buffer, work)
            else:
                future = self._start(buffer, work, is_last)
        self.step += is_last
        return future

    def state(self) -> dict[str, Tensor]:
        """What this rank must keep for a restart: learned levels, and what coding took away."""
        found = {"scale": torch.tensor([self._scale], dtype=torch.float64)}
        for index, bucket in self._buckets.items():
            for part in _PARTS:
                tensor = getattr(bucket.memory, part)
                if tensor is not None:
                    found[f"{index}/{part}"] = tensor.detach().cpu().clone()
            learned_at = torch.tensor([bucket.memory.learned_at])
            found[f"{index}/learned_at"] = learned_at
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave; without an argument's buckets, from nothing."""
        self._scale = float(state["scale"].item()) if "scale" in state else 1.0
        self._loaded = {}
        for name, tensor in state.items():
            place, _, part = name.partition("/")
            if not part:
                continue
            memory = self._loaded.setdefault(int(place), Memory())
            if part == "learned_at":
                memory.learned_at = int(tensor.item())
            else:
                setattr(memory, part, tensor.clone())
        for index, bucket in self._buckets.items():
            bucket.memory = self._loaded.get(index, Memory())

    def _known(self, bucket: Any, buffer: Tensor) -> _Bucket:
        parameters = bucket.parameters()
        members = tuple(map(id, parameters))
        known = self._buckets.get(bucket.index())
        if known is None or known.members != members:
            is_coded = buffer.dtype in CODED_DTYPES
            sizes = [(p.numel(), not is_coded or id(p) in self._exempt) for p in parameters]
            coded, exact = spans_of(sizes)
            memory = self._loaded.get(bucket.index(), Memory())
            known = _Bucket(members, coded, exact, memory)
            self._buckets[bucket.index()] = known
        memory = known.memory
        for part in _PARTS:
            tensor = getattr(memory, part)
            if tensor is not None and tensor.device != buffer.device:
                setattr(memory, part, tensor.to(buffer.device))
        return known

    def _average(self, buffer: Tensor, known: _Bucket, index: int) -> Iterator[Any]:
        values, exact = take(buffer, known.coded), take(buffer, known.exact)
        yield from self._averaging.run(values, exact, known.memory, 2 * index, self.step)
        for part, spans in ((values, known.coded), (exact, known.exact)):
            if len(spans) > 1:  # else it is the buffer's own memory
                put(buffer, spans, part)

    def _queue(self, buffer: Tensor, steps: Iterator[Any]) -> Future[Tensor]:
        """Queue all of a bucket's work on a GPU; nothing here waits for it."""
        device = buffer.device
        stream: Any = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for work in steps:
                work.wait()  # makes the stream wait
            buffer.record_stream(stream)
            future: Future[Tensor] = Future(devices=[device])
            future.set_result(buffer)  # remembers where the stream stands
        return future

    def _start(self, buffer: Tensor, steps: Iterator[Any], is_last: bool) -> Future[Tensor]:
        """Start a bucket's first phase on a CPU, and go on with those before it."""
        future: Future[Tensor] = Future()
        before, self._waiting = self._waiting, []
        started = next(steps, None)
        for entry in before:
            self._go_on(*entry)
        self._waiting.append((steps, started, future, buffer))
        while is_last and self._waiting:
            before, self._waiting = self._waiting, []
            for entry in before:
                self._go_on(*entry)
        return future

    def _go_on(
        self, steps: Iterator[Any], work: Any, future: Future[Tensor], buffer: Tensor
    ) -> None:
        if work is not None:
            work.wait()
        started = next(steps, None)
        if started is None:
            future.set_result(buffer)
        else:
            self._waiting.append((steps, started, future, buffer))
