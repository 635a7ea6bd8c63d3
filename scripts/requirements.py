"""Print the requirements of the project and its extras, one a line, as pyproject.toml has them."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
groups = [project["dependencies"], *project["optional-dependencies"].values()]
print("\n".join(requirement.replace(" ", "") for group in groups for requirement in group))
