"""Gradients at fewer bits under `DistributedDataParallel`: its communication hook.

Each DDP bucket is sent as it is, cast, or coded. What is coded is averaged in two phases (see
`two_phase`), and norms, biases and small tensors ride along as they are. A bucket with a NaN or
an infinity on any rank comes back with one on every rank, so that ranks leave out the step
together.

On a GPU the work of a coded bucket is queued on a stream of its own. On a CPU, where a
collective must be waited for, its second phase starts when the next bucket is ready: all ranks
start their collectives in the same order, and the first phase overlaps with the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from qsync_opt.errors import ParameterError
from qsync_opt.runtime.bucket_bits import PlannedBits, Sending, Uniform
from qsync_opt.runtime.bucket_codec import CODED_DTYPES, exempt_parameters, put, spans_of, take
from qsync_opt.runtime.communication import Communication, ring_bytes
from qsync_opt.runtime.host_reduction import Reduction, goes_by_host
from qsync_opt.runtime.shared_reduction import reduction_for
from qsync_opt.runtime.two_phase import Averaging, Exchange, Memory

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

#: What a bucket is cast to -> torch's hook, and the dtype on the wire.
_CAST_HOOKS: Mapping[str, tuple[Any, torch.dtype]] = {
    "fp16": (default_hooks.fp16_compress_hook, torch.float16),
    "bf16": (default_hooks.bf16_compress_hook, torch.bfloat16),
}

#: What ranks must agree on.
_AGREED = "how gradients are sent"

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
        The hook; None where gradients are sent as they are.

    Raises:
        ParameterError: weights are to be coded.
        TrainError: ranks do not agree.
    """
    if communication.weights is not None:
        rule = "must leave weights alone: DDP keeps whole ones on every rank and sends none"
        remedy = "Shard the model and use quantize_sharding, or code gradients only"
        raise ParameterError("communication, weights", rule, str(communication), remedy)
    if communication.cast is None and communication.gradients is None:
        # Ranks that code would else wait for those that do not.
        group: Any = model.process_group
        Exchange(group).require_equal([0], next(model.parameters()).device, _AGREED)
        return None
    return _register(model, Uniform(communication=communication), seed)


def send_at_bits(
    model: DistributedDataParallel, bits: PlannedBits, *, seed: int = 0
) -> GradientHook:
    """Register a hook that sends each bucket at the bits that a plan has for it.

    As `compress_gradients`; `GradientHook.change` takes the bits of another plan.

    Raises:
        TrainError: ranks do not agree.
    """
    return _register(model, bits, seed)


def _register(model: DistributedDataParallel, sending: Sending, seed: int) -> GradientHook:
    group: Any = model.process_group
    hook = GradientHook(model.module, sending, Exchange(group), seed)
    # DDP looks at annotations and takes no text for them; a lambda has none.
    model.register_comm_hook(None, lambda state, bucket: hook.reduce(bucket))
    return hook


class _Bucket:
    """What is known of a DDP bucket.

    Attributes:
        members: identities of its parameters: DDP forms buckets anew after the first backward.
        cast: what it is cast to; None where it is not.
        averaging: of what is coded; None where nothing is.
        coded: where coded values lie.
        exact: where the others lie.
        memory: see `Memory`.
    """

    def __init__(
        self,
        members: tuple[int, ...],
        cast: str | None,
        averaging: Averaging | None,
        spans: tuple[list[slice], list[slice]],
        memory: Memory,
    ) -> None:
        self.members = members
        self.cast = cast
        self.averaging = averaging
        self.coded, self.exact = spans
        self.memory = memory


class GradientHook:
    """Averages the gradients of DDP's buckets; see `compress_gradients` and `send_at_bits`.

    Attributes:
        step: of training, which the random bits depend on; counts by itself.
        exchange: of the ranks, with the bytes that this one sent.
    """

    def __init__(self, model: nn.Module, sending: Sending, exchange: Exchange, seed: int) -> None:
        self.step = 0
        self.exchange = exchange
        self._scale = 1.0
        self._seed = seed
        # Parameters live as long as the model, so their identities stay theirs.
        self._model = model
        self._names = {id(p): name for name, p in model.named_parameters()}
        self.change(sending)
        self._waiting: list[tuple[Iterator[Any], Any, Future[Tensor], Tensor]] = []
        self._streams: dict[torch.device, Any] = {}
        self._reduction: Reduction | None = None  # where whole buckets go past the backend
        sizes = [p.numel() for p in model.parameters() if p.requires_grad]
        facts = [*sending.facts(), seed, len(sizes), *sizes]
        facts = [int(fact) & 0x7FFFFFFFFFFFFFFF for fact in facts]
        device = next(model.parameters()).device
        exchange.require_equal(facts, device, _AGREED)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent so far."""
        return self.exchange.sent_bytes

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

    def leave_out(self) -> None:
        """The step whose gradients came last is not taken: its codes took nothing away.

        Else what is not finite in one bucket would change what all others give back. All ranks
        call it together, where a loss scaler leaves out a step.
        """
        for bucket in self._buckets.values():
            bucket.memory.undo()

    def change(self, sending: Sending) -> None:
        """Send otherwise from the next step on; all ranks call it with the same.

        What buckets kept of their codes before is gone.
        """
        self._sending = sending
        self._exempt = {id(p) for p in exempt_parameters(self._model, sending.bucket_size)}
        self._buckets: dict[int, _Bucket] = {}
        self._loaded: dict[int, Memory] = {}

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Average a `GradBucket`; what DDP calls."""
        buffer: Tensor = bucket.buffer()
        index: int = bucket.index()
        if index == 0:
            self._waiting.clear()  # of a backward that broke off
        is_last: bool = bucket.is_last()
        known = self._known(bucket, buffer)
        if self.exchange.world == 1:
            future: Future[Tensor] = Future()
            future.set_result(buffer)
        else:
            before, self._waiting = self._waiting, []
            if known.averaging is None:
                future = self._send_whole(bucket, buffer, known.cast)
            else:
                work = self._average(buffer, known, known.averaging, index)
                future = self._queue(buffer, work) if buffer.is_cuda else self._start(buffer, work)
            for entry in before:
                self._go_on(*entry)
            while is_last and self._waiting:
                before, self._waiting = self._waiting, []
                for entry in before:
                    self._go_on(*entry)
        self.step += is_last
        return future

    def close(self) -> None:
        """End what runs beside the backward."""
        if self._reduction is not None:
            self._reduction.close()

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
        parameters: Sequence[Tensor] = bucket.parameters()
        members = tuple(map(id, parameters))
        index: int = bucket.index()
        known = self._buckets.get(index)
        if known is None or known.members != members:
            known = self._buckets[index] = self._made(index, buffer, parameters, members)
        memory = known.memory
        for part in _PARTS:
            tensor = getattr(memory, part)
            if tensor is not None and tensor.device != buffer.device:
                setattr(memory, part, tensor.to(buffer.device))
        return known

    def _made(
        self, index: int, buffer: Tensor, parameters: Sequence[Tensor], members: tuple[int, ...]
    ) -> _Bucket:
        """What becomes of a bucket that was not there before."""
        width = buffer.element_size()
        wanted = self._sending.of({self._names[id(p)]: p.numel() * width for p in parameters})
        is_sent_whole = wanted.gradients is None and wanted.cast is None
        if buffer.layout is not torch.strided and not is_sent_whole:
            rule = "must be dense: a sparse gradient cannot be coded"
            raise ParameterError("gradients", rule, buffer.layout, "Build layers with sparse=False")
        is_coded = buffer.dtype in CODED_DTYPES
        averaging = None
        if wanted.gradients is not None:
            averaging = Averaging(
                exchange=self.exchange,
                coding=wanted.gradients,
                bucket_size=wanted.bucket_size,
                seed=self._seed,
            )
        return _Bucket(
            members,
            wanted.cast if buffer.dtype is torch.float32 else None,
            averaging,
            spans_of((p.numel(), not is_coded or id(p) in self._exempt) for p in parameters),
            self._loaded.get(index, Memory()),
        )

    def _send_whole(self, bucket: Any, buffer: Tensor, cast: str | None) -> Future[Tensor]:
        """Average a bucket without codes, by torch's own hooks where they can."""
        run, wire = default_hooks.allreduce_hook, buffer.dtype
        if cast is not None:
            run, wire = _CAST_HOOKS[cast]
        size_bytes = buffer.numel() * wire.itemsize
        self.exchange.sent_bytes += ring_bytes(size_bytes, self.exchange.world)
        if goes_by_host(buffer, self.exchange.group):
            if self._reduction is None:
                self._reduction = reduction_for(self.exchange.group, buffer.device)
            return self._reduction.average(buffer, wire)
        future: Future[Tensor] = run(self.exchange.group, bucket)
        return future

    def _average(
        self, buffer: Tensor, known: _Bucket, averaging: Averaging, index: int
    ) -> Iterator[Any]:
        values, exact = take(buffer, known.coded), take(buffer, known.exact)
        yield from averaging.run(values, exact, known.memory, 2 * index, self.step)
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

    def _start(self, buffer: Tensor, steps: Iterator[Any]) -> Future[Tensor]:
        """Start the first phase of a bucket on a CPU."""
        future: Future[Tensor] = Future()
        self._waiting.append((steps, next(steps, None), future, buffer))
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
