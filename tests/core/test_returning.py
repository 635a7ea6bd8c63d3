"""A controller that is killed at any moment comes back to its cohort: every sample is accepted once, none is lost."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from rehearsal import Rehearsal

from backend.core.cohort import Cohort
from backend.core.config import RunConfig
from backend.core.returning import Kept, read_kept
from backend.core.vocabulary import Effect, HostSaid, RankSaid, Refused, SendRelay, Tick, WriteCheckpoint
from simulation.played import Batch, PlayedHost, PlayedRank
from simulation.props import VERSIONS
from simulation.rounds import Sum
from simulation.watch import Watcher
from wire.messages import Accept, Device, Hello, Message, RankReady, Reject, RoundCommitted, RunEnded, Shutdown

CONFIG = RunConfig(
    job="j.py:J", quorum=2, target=2, batch_size=4, epochs=2, initial_anchor=2, checkpoint_epochs=None, max_anchor=4
)
SAMPLES = 90
PACES = (5.0, 11.0)
MIDWAY = 0.18
"""seconds: in a window, three rounds are committed"""


class Accepted(Watcher):
    """The batches behind each committed round."""

    def __init__(self) -> None:
        self.rounds: dict[int, list[Batch]] = {}

    def committed(self, number: int, result: Sum, batches: dict[int, list[Batch]]) -> None:
        if number >= 0:
            self.rounds[number] = [batch for rank in result.steps for batch in batches[rank]]


class Play(Rehearsal):
    """One controller's life."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, samples=SAMPLES)
        self.slots: dict[int, dict[str, Any]] = {}
        self.buried: list[dict[str, Any]] = []
        """what the lives before wrote down"""
        self.accepted = Accepted()
        self.watchers.append(self.accepted)

    def kept(self, newest: int = 99) -> Kept | None:
        """What the next controller reads; rounds beyond ``newest`` did not make it to the disk."""
        rows = [row for row in self.rows("continuations") if row["state"].get("round", -1) <= newest]
        slots = {row["slot"]: json.loads(json.dumps(row["state"])) for row in rows}
        return read_kept(self.slots | slots, [*self.buried, *self.rows("deaths")])


class Restarted(Play):
    """The next controller, and what is left of the cohort of the one before."""

    def __init__(self, before: Play, kept: Kept, *away: str) -> None:
        super().__init__(before.config)
        self.slots = before.slots | {row["slot"]: row["state"] for row in before.rows("continuations")}
        self.buried = [*before.buried, *before.rows("deaths")]
        self.cohort = Cohort(1, before.config, run_salt=b"salt", run_secret=None, job_hash="", now=0.0)
        self.cohort.take_back(kept, 0.0)
        self.feed(Tick())
        for host in before.hosts.values():
            if host.name not in away:
                self.come_back(host)

    def hello(self, name: str, link: int, number: int) -> None:
        hello = Hello(host=name, devices=[Device(id="cpu:0", type="cpu")], versions=VERSIONS, returning=number)
        self.feed(HostSaid(link, hello, address="10.0.0.9"))

    def come_back(self, before: PlayedHost) -> None:
        host = PlayedHost(name=before.name, link=next(self._links), paces=before.paces, host=before.host)
        self.hosts[host.name] = self._host_of_link[host.link] = self._host_of_number[host.host] = host
        self.hello(host.name, host.link, host.host)
        self.stage.after(1.0, self._beat, host)
        for old in before.ranks:
            old.settle()
            played = PlayedRank(old.rank, host, old.pace, self)
            self.ranks[old.rank] = played
            host.ranks.append(played)
            played.w = played.base = old.base
            played.held_round, played.alive = old.held_round, old.alive
            ready = RankReady("L", 1, 0, held_round=old.held_round, held_hash=f"{old.base}")
            self.stage.after(0.05, self.say_again, played, ready)
        self.stage.after(0.04, self.attach, host)

    def say_again(self, played: PlayedRank, message: Message) -> None:
        if played.alive:
            self.feed(RankSaid(played.rank, message))


def killed(config: RunConfig, at: float) -> Play:
    play = Play(config)
    for number, pace in enumerate(PACES):
        play.join(f"h{number}", pace)
    return play.run(until=at)


def trained(*lives: Play) -> Counter[tuple[int, int]]:
    """(epoch, sample) of every accepted sample. A round that the next controller does again counts there."""
    rounds: dict[int, list[Batch]] = {}
    for play in lives:
        march = play.cohort.march
        if march is not None and march.forming.brings is not None:
            rounds = {number: batches for number, batches in rounds.items() if number <= march.forming.brings}
        rounds |= play.accepted.rounds
    batches = (batch for of_round in rounds.values() for batch in of_round)
    return Counter((epoch, sample) for epoch, offset, size in batches for sample in range(offset, offset + size))


def whole() -> Counter[tuple[int, int]]:
    return Counter({(epoch, sample): 1 for epoch in range(CONFIG.epochs) for sample in range(SAMPLES)})


@pytest.mark.parametrize("mode", ["cpu_sync", "cpu_cadence", "cpu_async"])
def test_a_kill_at_any_moment(mode: str):
    config = replace(CONFIG, mode=mode)
    told = (at for at, _, what in killed(config, 1e9).log if isinstance(getattr(what, "message", None), Shutdown))
    returned = 0
    for moment in range(1, int(min(told) * 1000), 7):
        before = killed(config, moment / 1000)
        kept = before.kept()
        if kept is None:
            assert not before.accepted.rounds, "a committed round is written down"
            continue
        returned += 1
        again = Restarted(before, kept).run()
        assert again.end is not None, f"killed at {moment} ms: no end"
        assert again.end.phase == "done", f"killed at {moment} ms: {again.end.reason}"
        assert trained(before, again) == whole(), f"killed at {moment} ms"
        assert again.rows("runs")[-1]["summary"]["samples_accepted"] == [SAMPLES] * CONFIG.epochs
        assert not again.rows("deaths")
    assert returned > 20


def swallow_commits_of(round_: int, play: Play, but: int | None = None):
    """The controller dies while it says that this round is committed; host ``but`` has heard."""

    def swallow(effect: Effect) -> bool:
        commit = isinstance(effect, SendRelay) and isinstance(effect.message, RoundCommitted)
        return commit and effect.message.round == round_ and effect.host != but

    play.intercept = swallow


@pytest.mark.parametrize("heard", [None, 0, 1])
def test_a_kill_between_the_write_and_the_commit(heard: int | None):
    """Nobody has adopted what is written down, or one host has: the newest round that is on a rank is where it goes on,
    from a rank that holds it."""
    before = Play(CONFIG)
    swallow_commits_of(3, before, heard)
    for number, pace in enumerate(PACES):
        before.join(f"h{number}", pace)
    before.run(until=60.0)
    kept = before.kept()
    assert kept is not None
    assert sorted(kept.positions) == [2, 3]
    again = Restarted(before, kept)
    requests = [entry for entry in again.run().log if type(entry[2]).__name__ == "OpenRound"]
    assert requests
    assert again.end is not None
    assert again.end.phase == "done", again.end.reason
    assert trained(before, again) == whole()
    march = again.cohort.march
    assert march.forming.brings == (2 if heard is None else 3)
    assert min(again.accepted.rounds) == (5 if heard is None else 4), "round 3 is known, and 4 would replace round 2"
    if heard is not None:
        root = before.hosts[f"h{heard}"].ranks[0].rank
        assert march.forming.root == root


@pytest.mark.parametrize("mode", ["cpu_sync", "cpu_cadence", "cpu_async"])
def test_two_kills_at_any_moments(mode: str):
    config = replace(CONFIG, mode=mode)
    ends = Counter()
    for first, second in [(first, second) for first in (90, 130, 170, 210) for second in range(5, 170, 11)]:
        before = killed(config, first / 1000)
        kept = before.kept()
        if kept is None:
            continue
        again = Restarted(before, kept).run(until=second / 1000)
        if again.end is None and all(played.alive for played in again.ranks.values()):
            last = Restarted(again, again.kept()).run()
            assert last.end.phase == "done", f"killed at {first} and {second} ms: {last.end.reason}"
            assert trained(before, again, last) == whole(), f"killed at {first} and {second} ms"
            begun = again.cohort.march.forming.brings is not None
            ends["in training" if again.accepted.rounds else "in its first round" if begun else "waiting"] += 1
    assert len(ends) == 3


def test_what_was_not_written_down_in_time_is_not_guessed():
    before = killed(CONFIG, MIDWAY)
    last = max(before.accepted.rounds)
    kept = before.kept(newest=last - 1)
    again = Restarted(before, kept).run()
    assert again.end.phase == "interrupted"
    assert f"the cohort holds round [{last}]" in again.end.reason
    assert all(any(isinstance(told, RunEnded) for told in host.told) for host in again.hosts.values())


def test_who_died_since_the_last_round_is_not_waited_for():
    """The death is on record; the position that is kept is older."""
    before = killed(CONFIG, MIDWAY)
    before.kill(1)
    again = Restarted(before, before.kept()).run()
    assert again.end.phase == "done", again.end.reason
    assert again.rows("deaths") == [], "it dies once"
    assert trained(before, again) == whole()
    told = [entry for entry in again.log if isinstance(entry[2], SendRelay) and entry[2].host == 1]
    assert not told, "its host is out"


@pytest.mark.parametrize("known", [False, True], ids=["unheard", "late"])
def test_a_rank_that_dies_while_its_cohort_comes_back(known: bool):
    """Its agent tells the next controller, which goes on without it."""
    before = killed(CONFIG, MIDWAY)
    before.ranks[1].alive = known
    again = Restarted(before, before.kept())
    again.stage.after(0.045, again.kill, 1)  # after the relay, before the rank has gone back
    again.run()
    assert again.end.phase == "done", again.end.reason
    assert [death["rank"] for death in again.rows("deaths")] == [1]
    assert trained(before, again) == whole()


def test_the_work_of_a_controller_that_was_killed_before_it_saved_is_saved_by_the_next():
    end = killed(CONFIG, 1e9)
    saved = next(at for at, _, what in end.log if isinstance(what, WriteCheckpoint))
    before = killed(CONFIG, saved - 1e-6)
    again = Restarted(before, before.kept()).run()
    assert again.end.phase == "done", again.end.reason
    assert not again.accepted.rounds, "all was trained"
    assert again.rows("checkpoints")


def test_who_left_as_it_was_told_is_not_dead():
    """Killed between the word to leave and the end: all is trained and saved, and its agents say who has left."""
    told = next(at for at, _, what in killed(CONFIG, 1e9).log if isinstance(getattr(what, "message", None), Shutdown))
    before = killed(CONFIG, told + 0.01)
    for played in before.ranks.values():
        played.alive = False
    again = Restarted(before, before.kept())
    for rank in before.ranks:
        again.stage.after(0.05, again.exited, again.ranks[rank])
    again.run()
    assert (again.end.phase, again.rows("deaths")) == ("interrupted", [])
    assert "have left, as they were told" in again.end.reason
    assert again.now < 1.0, "nobody is waited for"


def interrupted_or_done(config: RunConfig) -> tuple[Restarted, Any]:
    before = killed(config, MIDWAY)
    again = Restarted(before, before.kept(), "h1").run()
    assert again.now >= config.return_seconds
    return again, again.end


def test_a_host_that_stays_away_is_left_behind_where_the_run_tolerates_that():
    again, end = interrupted_or_done(replace(CONFIG, reattach_seconds=7.0))
    assert end.phase == "done", end.reason
    assert [death["host_name"] for death in again.rows("deaths")] == ["h1"]
    assert again.rows("runs")[-1]["summary"]["samples_accepted"] == [SAMPLES] * CONFIG.epochs


def test_a_host_that_stays_away_interrupts_a_run_that_tolerates_no_death():
    again, end = interrupted_or_done(replace(CONFIG, reattach_seconds=7.0, max_failure=0.0))
    assert end.phase == "interrupted"
    assert "not all back within 7 s" in end.reason
    assert "h1" in end.reason
    assert "summary" not in again.rows("runs")[-1], "what the run achieved stays written"
    assert [row["reason"] for row in again.rows("checkpoints")] == [end.reason], "who is there has saved"


def test_nobody_comes_back():
    before = killed(CONFIG, MIDWAY)
    again = Restarted(before, before.kept(), "h0", "h1").run()
    assert again.now >= CONFIG.return_seconds
    assert again.end.phase == "interrupted"
    assert again.rows("deaths") == again.rows("checkpoints") == []


def test_two_claims_for_one_host_and_hosts_unknown_are_refused_by_name():
    before = killed(CONFIG, MIDWAY)
    again = Restarted(before, before.kept())
    for link, (name, number) in enumerate([("h0", 0), ("h0", 1), ("somebody", 7)], start=90):
        host = PlayedHost(name=name, link=link, paces=[])
        again._host_of_link[link] = host
        again.hello(name, link, number)
        (told,) = host.told
        assert isinstance(told, Reject)
        assert told.code == "cannot_return"
    assert isinstance(again.hosts["h0"].told[0], Accept)
    assert again.run().end.phase == "done"


def test_nothing_is_kept_where_nobody_is_to_come_back():
    assert killed(replace(CONFIG, reattach_seconds=0.0), MIDWAY).rows("continuations") == []


def test_a_stop_while_its_cohort_comes_back_saves_before_it_ends_the_run():
    before = killed(CONFIG, MIDWAY)
    again = Restarted(before, before.kept())
    refused = []
    again.at(0.02, lambda: again.operate("stop", by="somebody"))
    again.at(0.03, lambda: refused.extend(again.operate("stop", by="somebody")))
    again.run()
    last = again.cohort.march.forming.brings
    assert (again.end.phase, again.end.reason) == ("done", f"Stopped by somebody after round {last}")
    assert not again.accepted.rounds, "nothing is trained any more"
    assert [row["reason"] for row in again.rows("checkpoints")] == [again.end.reason]
    assert again.rows("runs")[-1]["stopped_by"] == "somebody"
    assert [each.code for each in refused] == ["already_ending"]
    assert "somebody asked the run to stop: it ends when its cohort is back and has saved" in [
        row["text"] for row in again.rows("events")
    ]


@pytest.mark.parametrize(("at", "round_number"), [(MIDWAY, 2), (0.13, 2)])
def test_a_save_while_its_cohort_comes_back_is_made_at_its_next_round(at, round_number):
    """Or before it, where the last round completed an epoch."""
    before = killed(CONFIG, at)
    again = Restarted(before, before.kept())
    refused = []
    again.at(0.02, lambda: refused.extend(again.operate("save", by="somebody")))
    again.run()
    assert not [each for each in refused if isinstance(each, Refused)]
    assert again.end.phase == "done"
    made = [row["round"] for row in again.rows("checkpoints") if row["reason"] == "asked for by somebody"]
    assert made == [round_number]


def test_a_stop_under_the_controller_that_was_killed_is_obeyed_by_the_next():
    before = killed(CONFIG, MIDWAY)
    before.operate("stop", by="somebody")
    rounds = len(before.accepted.rounds)
    before.run(until=MIDWAY + 0.03)
    kept = replace(before.kept(), stopping="somebody")
    assert before.end is None
    again = Restarted(before, kept).run()
    assert (again.end.phase, again.end.reason.partition(" after")[0]) == ("done", "Stopped by somebody")
    assert len(before.accepted.rounds) - rounds <= 1


def test_a_stop_that_nobody_comes_back_for_leaves_the_run_interrupted():
    before = killed(CONFIG, MIDWAY)
    again = Restarted(before, before.kept(), "h0", "h1")
    again.at(0.02, lambda: again.operate("stop", by="somebody"))
    again.run()
    assert again.end.phase == "interrupted"
    assert again.rows("runs")[-1]["stopped_by"] == "somebody"


def test_an_abort_while_its_cohort_comes_back_waits_for_nobody():
    before = killed(CONFIG, MIDWAY)
    again = Restarted(before, before.kept())
    again.at(0.02, lambda: again.operate("abort", by="somebody"))
    again.run()
    assert (again.end.phase, again.end.reason, again.now) == ("failed", "Aborted by somebody", 0.02)
