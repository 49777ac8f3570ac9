"""One rank of a DDP job whose operators take the times they are told; see the test beside it.

Each forward and backward of a module is held until all before it and it would be done, had they
taken the times given: what it really does is part of that time. Reductions hand on what they
reduced after the time given, in one lane a rank. Everything else is real: the model and its
converted layers, autograd's order, DDP's buckets, gloo and its rendezvous.
Usage: script RANK PORT FOLDER.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import GradBucket, TCPStore  # type: ignore[attr-defined]  # not in lists
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.files import load_graph
from qsync_opt.measure.model_file import load_model
from qsync_opt.measure.step import split_batch
from qsync_opt.measure.uniform import converted, run_loss
from qsync_opt.precision import Precision

#: Steps before the first that counts: DDP forms its buckets anew after one.
WARM_UP = 2

#: Steps until so many were punctual: no operator and no reduction was done later than it should
#: by more than this fraction of the step. On a busy machine that takes longer; then it is given up.
PUNCTUAL, LATE, MOST = 2, 0.03, 40


def main(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    for name, job in json.loads((folder / "jobs.json").read_text()).items():
        model, batch, loss = load_model(job["model"], job["sizes"])
        graph = load_graph(folder / f"{name}.graph.json")
        for plan_name, plan in job["plans"].items():
            row = plan[rank]
            precisions = {key: Precision(value) for key, value in row["precisions"].items()}
            with converted(model, graph, precisions):
                found[f"{name}, {plan_name}"] = step_s(model, batch, loss, job, row)
    distributed.destroy_process_group()
    sys.stdout.write(json.dumps(found))


def step_s(model: nn.Module, batch: Any, loss: Any, job: Any, row: Any) -> float:
    """The shortest step of all that count, from an aligned start, as the slower rank saw it."""
    inputs, target = split_batch(batch, loss)
    device = Device()
    handles = [
        handle
        for name, module in model.named_modules()
        if name in row["forward_s"]
        for handle in device.held(module, row["forward_s"][name], row["backward_s"][name])
    ]
    wrapped = DistributedDataParallel(model, bucket_cap_mb=job["bucket_cap_mb"])
    network = Network(job["all_reduce_s"])
    wrapped.register_comm_hook(None, network.hook)
    best, punctual, count = float("inf"), 0, 0
    while count < WARM_UP + MOST and punctual < PUNCTUAL:
        for parameter in model.parameters():
            parameter.grad = None
        distributed.barrier()
        begin = device.due = time.perf_counter()
        network.bucket = 0
        device.late = network.late = 0.0
        device.spend(row["optimizer_s"])
        run_loss(wrapped, inputs, target, loss).backward()  # type: ignore[no-untyped-call]
        elapsed = time.perf_counter() - begin
        worst = torch.tensor([elapsed, max(device.late, network.late)], dtype=torch.float64)
        distributed.all_reduce(worst, op=distributed.ReduceOp.MAX)
        seconds, late = worst.tolist()
        count += 1
        if count > WARM_UP:
            best = min(best, seconds)
            punctual += late <= LATE * seconds
    for handle in handles:
        handle.remove()
    network.close()
    return best


class Device:
    """The lane of one rank: what it runs is done no sooner than the times given add up to."""

    def __init__(self) -> None:
        self.due = self.late = 0.0

    def spend(self, seconds: float) -> None:
        self.due += seconds
        time.sleep(max(0.0, self.due - time.perf_counter()))
        self.late = max(self.late, time.perf_counter() - self.due)

    def held(self, module: nn.Module, forward_s: float, backward_s: float) -> list[Any]:
        """Hooks that make a module's forward and backward take their times."""

        def before(module: nn.Module, args: Any) -> None:
            self.spend(forward_s)

        def gradient(_: Tensor) -> None:
            self.spend(backward_s)

        def after(module: nn.Module, args: Any, output: Tensor) -> None:
            # A hook on the result runs just before the backward of what made it.
            output.register_hook(gradient)  # type: ignore[no-untyped-call]

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


class Network:
    """The network as one rank sees it: reductions one after another, each of a given length."""

    def __init__(self, all_reduce_s: list[float]) -> None:
        self.bucket = 0
        self.late = 0.0
        self._all_reduce_s = all_reduce_s
        self._thread = ThreadPoolExecutor(1)

    def hook(self, state: object, bucket: GradBucket) -> Any:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        tensor = bucket.buffer().div_(distributed.get_world_size())
        work = distributed.all_reduce(tensor, async_op=True)
        # Before the rebuild one bucket holds everything.
        seconds = self._all_reduce_s[min(self.bucket, len(self._all_reduce_s) - 1)]
        self.bucket += 1

        def finish() -> None:
            work.wait()
            due = time.perf_counter() + seconds
            time.sleep(seconds)
            self.late = max(self.late, time.perf_counter() - due)
            done.set_result(tensor)

        self._thread.submit(finish)
        return done

    hook.__annotations__ = {"bucket": GradBucket}

    def close(self) -> None:
        self._thread.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
