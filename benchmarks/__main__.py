"""``python -m benchmarks NAME [--json FILE] [options]``: run one of the measurements; each prints a table.

A measurement is a module of this package with ``add_options(parser)`` and ``measure(options) -> dict``: JSON-ready,
with the ``lines`` to print in it, and ``failed`` if it found something to be wrong: then the exit code is 1. Only the
one that is asked for is imported.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import platform
import sys
from pathlib import Path
from typing import Any, Protocol, cast

HERE = Path(__file__).parent


class Measurement(Protocol):
    """What a module of this package offers."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Options of its own."""
        ...

    def measure(self, options: argparse.Namespace) -> dict[str, Any]:
        """Do it."""
        ...


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measurements that anybody can repeat.",
        epilog="\n".join(f"{name:16} {headline}" for name, headline in _measurements().items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(_measurements()))
    name = parser.parse_args(arguments[:1]).name
    measurement = cast(Measurement, importlib.import_module(f"benchmarks.{name}"))
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=measurement.__doc__)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    measurement.add_options(parser)
    options = parser.parse_args(arguments[1:])
    found = measurement.measure(options)
    print("\n".join(found.pop("lines")))
    if options.json is not None:
        found |= {"benchmark": name, "machine": _machine()}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if found.get("failed") else 0


def _measurements() -> dict[str, str]:
    """Name and first line of each module that measures something."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        module = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def _machine() -> dict[str, Any]:
    return {"python": platform.python_version(), "system": platform.system(), "processor": platform.machine()}


if __name__ == "__main__":
    sys.exit(main())
