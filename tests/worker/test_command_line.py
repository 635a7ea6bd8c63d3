"""What an operator types: usage errors name the option, checks name the fault, and nothing is dialled for either."""

import json
import socket
from pathlib import Path

import pytest

from worker.agent import Patience
from worker.command_line import UsageError, _token, main, time_scale
from worker.exits import ExitCode
from worker.site_listen import listen_address

JOBS = Path(__file__).parent.parent / "jobs"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--join URL is missing"),
        (["--join", "ftp://x"], "is no address"),
        (["--join", "host", "--devices", "cpu:900"], "1 to 256"),
        (["--join", "host", "--job-dir", "/no/such/place"], "is not a directory"),
        (["--join", "host", "--emulate-ms-per-batch", "-1"], "must be above 0"),
        (["--join", "host", "--run", "0"], "--run 0"),
        (["--join", "host", "--devices", "cpu", "--token-file", "/no/such/token"], "--token-file /no/such/token"),
        (["--join", "host", "--listen", ":8471"], "add --relay-only"),
        (["--join", "host", "--relay-only", "--devices", "cpu"], "--devices has no place beside --relay-only"),
        (["--join", "host", "--relay-only", "--emulate-ms-per-batch", "5"], "--emulate-ms-per-batch has no place"),
        (["--join", "host", "--relay-only", "--listen", "8471"], "give HOST:PORT or :PORT"),
        (["--join", "host", "--relay-only", "--listen", ":70000"], "give HOST:PORT or :PORT"),
        (["--join", "host", "--relay-only", "--listen", "no.such.host.invalid:0"], "cannot be listened on"),
        (["--relay-only"], "--join URL is missing"),
        (["job", "check", "digits.py:Digits", "--params", "{"], "--params is no JSON"),
        (["job", "check", "digits.py:Digits", "--params", "[]"], "must be a JSON object"),
    ],
)
def test_a_command_that_cannot_be_followed_says_what_to_change(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, {}) == ExitCode.USAGE
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["--token", "a", "--token-file", "b"], ["job"], ["job", "dance"]]
)
def test_what_argparse_refuses_exits_with_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments, {})
    assert caught.value.code == 2


def test_a_dry_run_prints_what_would_be_announced(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--dry-run", "--devices", "cpu:2", "--name", "box", "--job-dir", str(JOBS), "--run", "3"]
    assert main(arguments, {}) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["name"], [device["id"] for device in told["devices"]]) == ("box", ["cpu:0", "cpu:1"])
    assert (told["run"], told["job_dir"], told["emulate_ms_per_batch"]) == (3, str(JOBS), None)
    assert told["versions"]["torch"]


def test_a_relay_only_host_announces_no_device_and_a_name_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--relay-only", "--join", "host"], {}) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["relay_only"], told["devices"]) == (True, [])
    assert told["name"] == f"{socket.gethostname()}-relay"


def test_a_taken_port_is_named_with_a_cure(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--join", "host", "--relay-only", "--listen", f"127.0.0.1:{port}"], {}) == ExitCode.USAGE
    assert f"port {port} on 127.0.0.1 cannot be listened on" in (said := capsys.readouterr().err)
    assert "choose another with --listen" in said


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":8471", ("", 8471)),
        ("10.0.0.5:0", ("10.0.0.5", 0)),
        ("[::1]:99", ("::1", 99)),
        ("relay.lan:1", ("relay.lan", 1)),
    ],
)
def test_where_a_relay_only_host_listens(text: str, address: tuple[str, int]) -> None:
    assert listen_address(text) == address


class Options:
    def __init__(self, token: str | None = None, token_file: Path | None = None) -> None:
        self.token = token
        self.token_file = token_file


def test_the_token_comes_from_the_nearest_place(tmp_path: Path) -> None:
    file = tmp_path / "join.token"
    file.write_text("from-file\n")
    environment = {"MARCHLINE_JOIN_TOKEN": " from-environment "}
    assert _token(Options(token="from-line"), environment) == "from-line"
    assert _token(Options(token_file=file), environment) == "from-file"
    assert _token(Options(), environment) == "from-environment"
    assert _token(Options(), {}) == ""
    file.write_text(" \n")
    with pytest.raises(UsageError, match="is empty"):
        _token(Options(token_file=file), {})


def test_one_factor_stretches_every_wait() -> None:
    assert time_scale({}) == 1.0
    assert time_scale({"MARCHLINE_TIME_SCALE": "2.5"}) == 2.5
    for text in ("0.05", "nan", "inf", "-1", "fast", ""):
        with pytest.raises(UsageError, match=r"at least 0\.1"):
            time_scale({"MARCHLINE_TIME_SCALE": text})


def test_the_pause_between_dials_doubles_up_to_a_minute() -> None:
    patience = Patience(persist=True)
    assert [patience.back_off_seconds(failures) for failures in range(6)] == [5, 10, 20, 40, 60, 60]
    assert patience.back_off_seconds(10**6) == 60


@pytest.mark.parametrize("job", ["digits.py:Digits", "tiny_gpt.py:TinyGPT"])
def test_the_examples_pass_their_check(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "check", job, "--job-dir", str(EXAMPLES)], {}) == 0
    told = capsys.readouterr().out
    assert "ok         the job will train" in told
    assert "step       loss" in told
    assert "note" not in told, "every parameter gets a gradient"


@pytest.mark.parametrize(
    ("job", "params", "says"),
    [
        ("broken.py:NoStep", "{}", "no method training_step"),
        ("broken.py:Empty", "{}", "train_dataset has no sample"),
        ("broken.py:Stream", "{}", "IterableDataset"),
        ("broken.py:MissingData", "{}", "broken.py:59: FileNotFoundError"),
        ("broken.py:Frozen", "{}", "nothing to train"),
        ("broken.py:TwoModels", "{}", "another model the second time"),
        ("broken.py:VectorLoss", "{}", "the loss has shape [2, 1]"),
        ("broken.py:DetachedLoss", "{}", "depends on no trainable parameter"),
        ("broken.py:NumberLoss", "{}", "returned float"),
        ("broken.py:NoLossKey", "{}", "a dict with accuracy"),
        ("broken.py:Typed", '{"hidden": "x"}', "$.hidden"),
        ("nowhere.py:Typed", "{}", "no job file nowhere.py"),
    ],
)
def test_a_check_names_the_fault_and_fails(
    job: str, params: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["job", "check", job, "--job-dir", str(JOBS), "--params", params], {}) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("wrong      ")
    assert says in last
