"""Recording what a model does, and measuring what that costs.

`qsync_opt.measure` is the name of this package and of a public function, so the package can be
called: it is `measuring.measure`.
"""

import inspect
import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A package that is called like the function of its name."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from qsync_opt.measure.measuring import measure

        return measure(*arguments, **settings)

    @property
    def __signature__(self) -> inspect.Signature:
        from qsync_opt.measure.measuring import measure

        return inspect.signature(measure)


sys.modules[__name__].__class__ = _CallableModule
