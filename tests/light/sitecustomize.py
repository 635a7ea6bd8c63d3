"""On the path of the processes that tests start: it spares each rank a second of processor time at its first step.

``torch.optim`` imports ``torch._dynamo`` (800 modules) there, only to tell a compiler that it may not look inside. No
job here is compiled, so it gets a module that knows how to do nothing; whoever wants more of it gets the real one. The
thorough run (MARCHLINE_TEST_THOROUGH=1) does without this.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class Idle(ModuleType):
    def graph_break(self, msg: str = "") -> None:
        pass

    def disable(self, fn: Any = None, recursive: bool = True, **_: Any) -> Any:
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(wake(), name)


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == NAME:
            return ModuleSpec(name, self, is_package=True)
        if name.startswith(f"{NAME}."):
            wake()
            return importlib.util.find_spec(name)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Idle(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


FINDER = Finder()


def wake() -> ModuleType:
    """The real module, in this one's place from now on."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
        del sys.modules[NAME]
    return importlib.import_module(NAME)


sys.meta_path.insert(0, FINDER)
