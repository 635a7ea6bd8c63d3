"""What all answers of the REST interface have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """An answer. Fields that a later version adds pass through."""

    model_config = ConfigDict(extra="allow")
