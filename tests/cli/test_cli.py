"""The command line against a real controller: data on stdout, words on stderr, exit codes 0, 1, 2 and 4."""

from __future__ import annotations

import json
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx2
import pytest
from bundles import save
from cli_harness import REPOSITORY, Served, clean_environment, cli, start_server

from backend.runtime.bundle import CheckpointPlace

pytestmark = pytest.mark.slow


def make_run(served: Served, *arguments: str) -> int:
    made = served.cli("runs", "create", "digits.py:Digits", "--start-mode", "manual", *arguments)
    assert made.returncode == 0, made.stderr
    return int(made.stdout)


def test_a_run_is_made_listed_looked_at_and_ended(served: Served) -> None:
    made = served.cli(
        "runs", "create", "digits.py:Digits", "--name", "first", "-p", "hidden=8", "-s", "seed=7",
        "--start-mode", "manual", "--epochs", "3", "--quorum", "3",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    run = made.stdout.strip()
    assert "waits for hosts" in made.stderr

    view = json.loads(served.cli("runs", "view", run, "--json").stdout)
    assert view["params"] == {"hidden": 8}
    assert (view["config"]["seed"], view["epochs"], view["window"]["quorum"]) == (7, 3, 3)
    shown = served.cli("status", run)
    assert shown.returncode == 0
    assert dict(line.split("\t", 1) for line in shown.stdout.splitlines())["run"] == f"{run} first"
    listed = served.cli("runs")
    assert [run, "first", "waiting"] in [line.split("\t")[:3] for line in listed.stdout.splitlines()]
    assert json.loads(served.cli("runs", "list", "--json").stdout)[0]["id"] == int(run)
    assert json.loads(served.cli("status", "last", "--json").stdout)["id"] == int(run)
    overview = json.loads(served.cli("status", "--json").stdout)
    assert int(run) in [item["id"] for item in overview["runs"]]
    assert served.url in served.cli("status").stdout

    refused = served.cli("start", run)
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith("error: ")
    ended = served.cli("abort", run, "--json")
    assert json.loads(ended.stdout)["phase"] == "failed"
    again = served.cli("stop", run)
    assert again.returncode == 1
    assert "over" in again.stderr


@contextmanager
def following(served: Served, run: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """``events RUN --follow`` once it follows."""
    where = ["--url", served.url, "--token-file", str(served.token_file)]
    with subprocess.Popen(
        [sys.executable, "-m", "backend", "events", run, "--follow", *options, *where],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as follower:
        try:
            assert follower.stderr is not None
            assert "Ctrl-C" in follower.stderr.readline()
            yield follower
        finally:
            if follower.poll() is None:
                follower.kill()


def test_a_run_is_resumed_by_number_and_what_cannot_be_is_named(served: Served) -> None:
    for arguments in (("resume", "1"), ("runs", "create", "--resume-from", "1:last"), ("save", "1")):
        refused = served.cli(*arguments)
        assert refused.returncode == 1, refused
        assert "error:" in refused.stderr
    made = served.cli("runs", "create", "digits.py:Digits", "--name", "first")
    number = made.stdout.strip()
    assert "has no complete checkpoint" in served.cli("resume", number, "--from", "best").stderr
    assert "nothing has been trained yet" in served.cli("save", number).stderr
    served.cli("abort", number, "--yes")
    save(CheckpointPlace(served.data_dir, int(number)), 3, [1.0], job="digits.py:Digits", run_id=int(number))
    again = served.cli("resume", number, "--set", "epochs=5")
    assert again.returncode == 0, again.stderr
    assert f"goes on from checkpoint 3 of run {number}" in again.stderr
    view = json.loads(served.cli("status", again.stdout.strip(), "--json").stdout)
    assert (view["name"], view["config"]["epochs"], view["job"]) == ("first", 5, "digits.py:Digits")
    served.cli("abort", again.stdout.strip(), "--yes")


def test_events_are_followed_to_the_end_of_the_run(served: Served) -> None:
    run = str(make_run(served))
    with following(served, run, "--json") as follower:
        served.cli("abort", run)
        printed, _ = follower.communicate(timeout=30)

    assert follower.returncode == 0
    followed = [json.loads(line) for line in printed.splitlines()]
    assert followed
    listed = served.cli("events", run, "--json")
    assert [json.loads(line) for line in listed.stdout.splitlines()] == followed
    plain = served.cli("events", run).stdout.splitlines()
    assert [line.split("\t")[3] for line in plain] == [event["text"] for event in followed]


def test_a_printed_link_signs_one_browser_in(served: Served) -> None:
    printed = served.cli("link").stdout.strip()
    base, _, ticket = printed.partition("/#ticket=")
    assert base == served.url
    with httpx2.Client(base_url=base, trust_env=False) as browser:
        assert browser.post("/api/v1/session", json={"ticket": ticket}).status_code == 201
        assert browser.get("/api/v1/runs").status_code == 200
    with httpx2.Client(base_url=base, trust_env=False) as browser:
        assert browser.post("/api/v1/session", json={"ticket": ticket}).status_code == 401
        assert browser.post("/api/v1/session", json={"ticket": served.ticket}).status_code == 201


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nonsense"], 2, "No such command"),
        (["start"], 2, "Missing argument"),
        (["start", "x"], 2, "is no run"),
        (["start", "-1"], 2, ""),
        (["start", "999"], 1, "no run 999"),
        (["runs", "create", "gone.py:X"], 1, "job: there is no job file"),
        (["runs", "create", "digits.py:Digits", "--quorum", "1"], 1, "quorum: quorum must be at least 2"),
        (["runs", "create", "digits.py:Digits", "-p", "hidden"], 2, "NAME=VALUE"),
        (["runs", "create", "digits.py:Digits", "-p", "hiden=1"], 1, "params.hiden"),
        (["runs", "create", "digits.py:Digits", "-s", "colour=red"], 1, "colour"),
        (["runs", "list", "--limit", "0"], 2, "limit"),
        (["status", "--url", "ftp://127.0.0.1"], 2, "is no address"),
        (["status", "--url", "127.0.0.1:8470"], 2, "is no address"),
        (["demo", "--speeds", "20"], 2, "two to eight"),
        (["demo", "--speeds", "20,x"], 2, "milliseconds"),
        (["serve", "--port", "70000"], 2, "port"),
    ],
)
def test_mistakes_are_named_with_their_exit_code(served: Served, arguments: list[str], code: int, says: str) -> None:
    done = served.cli(*arguments)

    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert says in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_without_a_good_token_it_is_exit_4_and_the_cure(served: Served, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.token"
    wrong.write_text("not-the-token-of-this-controller\n")
    for arguments, says in (
        (["--token-file", str(wrong)], str(wrong)),
        (["--token-file", str(tmp_path / "gone")], "--token-file"),
        ([], "var/operator.token"),
    ):
        done = cli("status", "--url", served.url, *arguments, cwd=tmp_path)
        assert done.returncode == 4, done.stderr
        assert says in done.stderr
        assert "not-the-token" not in done.stderr
    assert cli("runs", cwd=tmp_path, MARCHLINE_URL=served.url, MARCHLINE_TOKEN="wrong").returncode == 4
    (tmp_path / "empty").touch()
    assert cli("status", "--url", served.url, "--token-file", str(tmp_path / "empty"), cwd=tmp_path).returncode == 4
    found = cli("status", "--url", served.url, cwd=served.data_dir.parent)
    assert found.returncode == 0, found.stderr


def test_a_controller_that_is_not_there_is_named_with_the_cure(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        done = cli("status", "--url", url, cwd=tmp_path)

    assert done.returncode == 1
    assert url in done.stderr
    assert "python -m backend serve" in done.stderr


def test_a_stranger_at_the_address_is_named_and_gets_no_token(tmp_path: Path) -> None:
    seen: list[str] = []

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(f"{self.path} {self.headers}")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"product": "another"}')

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Stranger)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        done = cli("runs", "--url", url, cwd=tmp_path, MARCHLINE_TOKEN="the-operators-token")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

    assert done.returncode == 1
    assert "not a Marchline controller" in done.stderr
    assert len(seen) == 1
    assert "the-operators-token" not in seen[0]


def test_what_is_exposed_is_told_and_secrets_are_for_their_owner_and_in_no_log(tmp_path: Path) -> None:
    served = start_server(tmp_path, "--host", "0.0.0.0", "--allow-host", "march.example")
    token = served.token_file.read_text().strip()
    for _ in range(3):
        cli("status", cwd=tmp_path, MARCHLINE_URL=served.url, MARCHLINE_TOKEN="a-wrong-token")
    served.cli("status")
    served.process.send_signal(signal.SIGINT)
    stdout, stderr = served.process.communicate(timeout=30)

    assert served.process.returncode == 0
    assert any("It listens on 0.0.0.0" in line for line in served.printed)
    log = stdout + stderr
    assert "wrong credential from 127.0.0.1" in log
    for secret in (token, (served.data_dir / "join.token").read_text().strip(), "a-wrong-token", served.ticket):
        assert secret not in log
    for name in ("operator.token", "join.token"):
        assert stat.S_IMODE((served.data_dir / name).stat().st_mode) == 0o600
    for file in served.data_dir.glob("*.sqlite3*"):
        assert token.encode() not in file.read_bytes()


def test_a_taken_port_and_a_data_directory_in_use_are_named(served: Served, tmp_path: Path) -> None:
    port = served.url.rpartition(":")[2]
    done = cli("serve", "--port", port, "--data-dir", str(tmp_path / "var"), cwd=tmp_path)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    done = cli("serve", "--port", "0", "--data-dir", str(served.data_dir), cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    done = cli("serve", "--job-dir", "gone", "--data-dir", str(tmp_path / "var"), cwd=tmp_path)
    assert done.returncode == 2
    assert "gone" in done.stderr


def test_starting_the_command_line_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'sqlalchemy', 'fastapi', 'uvicorn', 'pydantic', 'httpx2', 'rich.table'}"
    code = f"import sys, backend.cli.app, backend.cli.show; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=REPOSITORY,
        check=True,
    )

    assert done.stdout.strip() == "[]"


def test_ctrl_c_ends_following_without_a_traceback(served: Served) -> None:
    run = str(make_run(served))
    with following(served, run) as follower:
        follower.send_signal(signal.SIGINT)
        _, stderr = follower.communicate(timeout=30)

    assert follower.returncode != 0
    assert "Traceback" not in stderr
    assert served.cli("abort", run).returncode == 0
