"""Print requirements as pyproject.toml has them, one a line: those of the groups named ("core" is the base), or all
but what only long campaigns need."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
groups = {"core": project["dependencies"], **project["optional-dependencies"]}
for name in sys.argv[1:] or [name for name in groups if name != "fuzz"]:
    print("\n".join(requirement.replace(" ", "") for requirement in groups[name]))
