"""Names of operators; the rule stands in the docstring of `graph`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qsync_opt.measure.records import Call


def operator_names(
    calls: Sequence[Call],
    main: Sequence[bool],
    adjustable: Sequence[bool],
    owning: Sequence[bool],
    leaf_modules: set[str],
) -> list[str]:
    """A unique name for the operator of each call.

    Args:
        calls: in forward order.
        main: whether the loss depends on it; what does not (a counter of batches, for example)
            does not keep one that does from carrying the module's name.
        adjustable: whether its precision is chosen.
        owning: whether it reads a parameter of its own module. An adjustable operator that
            does not is a functional call, even where it is alone in its module.
        leaf_modules: fully qualified names of modules without modules inside.
    """
    needed = {call.module for call, is_main in zip(calls, main, strict=True) if is_main}
    main = [m or call.module not in needed for call, m in zip(calls, main, strict=True)]
    runs = Counter((c.module, c.module_call) for c, m in zip(calls, main, strict=True) if m)
    crowded = {module for (module, _), count in runs.items() if count > 1}
    bases = []
    for call, is_main, chosen, owns in zip(calls, main, adjustable, owning, strict=True):
        alone = call.module in leaf_modules - crowded - {""}
        if is_main and alone and (owns or not chosen):
            bases.append(call.module)
        else:
            bases.append(f"{call.module}.{call.kind}" if call.module else call.kind)
    taken = set(bases)
    seen: Counter[str] = Counter()
    names = []
    for base in bases:
        name = base
        if seen[base]:
            number = seen[base]
            while (name := f"{base}.{number}") in taken:
                number += 1
            seen[base] = number
        seen[base] += 1
        taken.add(name)
        names.append(name)
    return names
