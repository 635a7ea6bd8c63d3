"""On the path of the processes that tests start: it spares each of them that imports torch a part of its start.

The first step of an optimizer imports torch's compiler, which takes as long as torch itself, only to tell it not to
look inside. No job here is compiled, so it gets a module that does nothing; whoever wants more of it gets the real
one. The thorough run (MARCHLINE_TEST_THOROUGH=1) does without this.
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

COMPILER = "torch._dynamo"


class Idle(ModuleType):
    def graph_break(self, msg: str = "") -> None:
        pass

    def disable(self, fn: Any = None, recursive: bool = True, **_: Any) -> Any:
        return (lambda function: function) if fn is None else fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(wake(), name)


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == COMPILER:
            return ModuleSpec(name, self, is_package=True)
        if name.startswith(f"{COMPILER}."):
            wake()
            return importlib.util.find_spec(name)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Idle(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


FINDER = Finder()


def wake() -> ModuleType:
    """The real compiler, in this one's place from now on."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
        sys.modules.pop(COMPILER, None)
    return importlib.import_module(COMPILER)


sys.meta_path.insert(0, FINDER)
