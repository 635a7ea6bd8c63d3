"""The jobs that this controller can see, read from their source and never executed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query

from backend.api import job_schemas as schemas
from backend.api.deps import TheController
from backend.api.strict import StrictRoute
from backend.runtime import jobs
from backend.runtime.jobs import JobInfo, ParamField

_JSON_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}

router = APIRouter(prefix="/jobs", tags=["jobs"], route_class=StrictRoute)


@router.get("", operation_id="list_jobs", response_model=schemas.JobList)
def list_jobs(controller: TheController) -> dict[str, Any]:
    """Every job below the job directory, and every file that looks like one and cannot be used."""
    survey = jobs.survey(controller.settings.job_dir)
    return {
        "items": [_described(info) for info in survey.jobs],
        "next_cursor": None,
        "broken": [asdict(broken) for broken in survey.broken],
        "truncated": survey.truncated,
    }


@router.get("/schema", operation_id="get_job_schema", response_model=schemas.JobSchema)
def get_job_schema(
    controller: TheController,
    job: Annotated[str, Query(max_length=512, examples=["examples/digits.py:Digits"])],
) -> dict[str, Any]:
    """A job's parameters as a JSON Schema: names, types, defaults and words."""
    info = jobs.inspect(controller.settings.job_dir, job)
    return {**_described(info), "schema": params_schema(info)}


def params_schema(info: JobInfo) -> dict[str, Any]:
    """JSON Schema of a job's ``Params``, in the order of its fields."""
    return {
        "title": info.name,
        "type": "object",
        "properties": {field.name: _property(field) for field in info.fields},
        "required": [field.name for field in info.fields if field.required],
        "additionalProperties": False,
    }


def _property(field: ParamField) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": _JSON_TYPES[field.type]}
    if field.description:
        schema["description"] = field.description
    if not field.required:
        schema["default"] = field.default
    return schema


def _described(info: JobInfo) -> dict[str, Any]:
    return {
        "job": info.job,
        "name": info.name,
        "path": info.path,
        "doc": info.doc,
        "file_hash": info.file_hash,
        "methods": list(info.methods),
    }
