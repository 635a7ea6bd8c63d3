"""What the REST interface says of job files."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from backend.api.answer import Answer
from backend.api.schemas import Page


class Job(Answer):
    """A job below the job directory."""

    job: str
    name: str
    path: str
    doc: str
    file_hash: str
    methods: list[str]


class BrokenJob(Answer):
    """A file or class that looks like a job and cannot be used."""

    job: str
    code: str
    text: str


class JobList(Page[Job]):
    """The jobs that this controller can see, and those that it cannot use."""

    broken: list[BrokenJob]
    truncated: bool


class JobSchema(Job):
    """A job with its parameters as a JSON Schema: the form of a new run."""

    params_schema: dict[str, Any] = Field(alias="schema", description="JSON Schema of the job's Params")
