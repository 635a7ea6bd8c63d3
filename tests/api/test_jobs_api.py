"""Jobs by REST: the list, and the form of a run as a JSON Schema."""

from __future__ import annotations

import pytest
from api_harness import Api, problem_of


def test_jobs_are_listed_with_those_that_cannot_be_used(api: Api) -> None:
    folder = api.controller.settings.job_dir
    (folder / "broken.py").write_text("class A(Job)\n")

    answer = api.call("GET", "/api/v1/jobs").json()

    assert [item["job"] for item in answer["items"]] == ["digits.py:Digits"]
    assert answer["items"][0]["doc"] == "Digits by a small network."
    assert [(item["job"], item["code"]) for item in answer["broken"]] == [("broken.py", "job_syntax_error")]
    assert answer["truncated"] is False


def test_the_schema_is_the_form_of_a_run(api: Api) -> None:
    answer = api.call("GET", "/api/v1/jobs/schema", params={"job": "digits.py:Digits"}).json()

    assert answer["name"] == "Digits"
    assert answer["schema"] == {
        "title": "Digits",
        "type": "object",
        "properties": {
            "hidden": {"type": "integer", "default": 64, "description": "units of the hidden layer"},
            "rate": {"type": "number", "default": 0.003},
        },
        "required": [],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("job", "status", "code"),
    [
        ("gone.py:X", 404, "job_not_found"),
        ("digits.py:X", 404, "job_class_missing"),
        ("../x.py:X", 422, "job_outside_dir"),
        ("digits.py", 404, "job_not_found"),
        ("x" * 600, 422, "invalid_request"),
    ],
)
def test_a_job_that_will_not_do_is_named(api: Api, job: str, status: int, code: str) -> None:
    answer = api.call("GET", "/api/v1/jobs/schema", params={"job": job})

    assert answer.status_code == status
    assert problem_of(answer)["code"] == code
