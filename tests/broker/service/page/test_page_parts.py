"""The page's parts without a network: who may look, and what becomes of a run's events."""

from __future__ import annotations

import json
import math
import time
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.access.admission import Admission, AdmissionError
from shoal.broker.service.page.digest import MOST_MOMENTS, MOST_POINTS, Digest, MetricTotals
from shoal.broker.service.page.keys import LONGEST_S, PageKeys
from shoal.broker.service.page.seen import tokens_per_step
from shoal.broker.service.page.serving import fingerprint, own_certificate, owners_certificate
from shoal.job import Job
from shoal.net.identity.authority import Authority, utc
from shoal.net.identity.credential import new_key, request_of
from shoal.net.identity.names import Party, PartyRole
from shoal.proto.admission_pb2 import JoinRequest
from shoal.proto.broker_pb2 import (
    BUILDING,
    DONE,
    RUNNING,
    WAITING,
    LinkUse,
    Outcome,
    Phase,
    Plan,
    RunEvent,
    RunSpec,
    RunState,
    StageSlot,
    StepDone,
)
from shoal.proto.common_pb2 import Reason

NOW = time.time()
ANN = Party(PartyRole.SUBMITTER, "ann-k3xq4vde")


def keys() -> PageKeys:
    return PageKeys(Admission(Authority.new(utc(NOW)), None))


KEYS = keys()


# ---------------------------------------------------------------- keys


def test_a_key_says_whose_it_is_until_it_ends():
    found = keys()
    key, ends_s = found.issue(ANN, 3600.0, NOW)
    assert ends_s == int(NOW + 3600)
    assert found.check(key, NOW) == (ANN, ends_s)
    assert found.check(key, ends_s - 1) == (ANN, ends_s)
    assert found.check(key, ends_s) is None


def test_a_key_of_another_broker_and_a_longer_or_greater_one_open_nothing():
    found, key = KEYS, keys().issue(ANN, 3600.0, NOW)[0]
    assert found.check(key, NOW) is None
    mine, ends_s = found.issue(ANN, 3600.0, NOW)
    for forged in (
        mine.replace(str(ends_s), str(ends_s + 1)),
        mine.replace("submitter", "operator"),
        mine.replace("ann-", "bob-"),
        mine.replace("shp1", "shp2"),
        mine.rpartition(".")[0] + ".",
        "",
    ):
        assert forged != mine
        assert found.check(forged, NOW) is None


@given(st.data())
def test_no_changed_key_opens_anything(data: st.DataObject):
    key = KEYS.issue(ANN, 3600.0, NOW)[0]
    at = data.draw(st.integers(0, len(key) - 2))  # the last character has bits that mean nothing
    other = data.draw(st.characters(codec="utf-8"))
    changed = key[:at] + other + key[at + 1 :]
    assert (KEYS.check(changed, NOW) is None) == (changed != key)


@given(st.text(max_size=400))
def test_no_text_opens_anything_and_none_breaks_it(text: str):
    assert KEYS.check(text, NOW) is None
    assert KEYS.check(f"shp1.{int(NOW) + 99}.operator.{text}", NOW) is None


def test_who_is_kicked_cannot_look_any_more():
    admission = Admission(Authority.new(utc(NOW)), None)
    found = PageKeys(admission)
    token = admission.invite(PartyRole.SUBMITTER, 1, timedelta(hours=1), "test", NOW)
    request = JoinRequest(
        version=1,
        invitation=token.id,
        secret=token.secret,
        name="ann",
        request=request_of(new_key()),
    )
    subject = admission.join(request, NOW).subject
    key = found.issue(Party(PartyRole.SUBMITTER, subject), 3600.0, NOW)[0]
    assert found.check(key, NOW) is not None
    admission.kick(subject, NOW)
    assert found.check(key, NOW) is None


@pytest.mark.parametrize("lasts_s", [0.0, -1.0, math.nan, math.inf, LONGEST_S + 1])
def test_times_that_cannot_be(lasts_s):
    with pytest.raises(AdmissionError, match="expected 60 s to 365 days"):
        keys().issue(ANN, lasts_s, NOW)


def test_a_peers_key_is_of_a_peer_and_a_broker_gets_none():
    lender = Party(PartyRole.PEER, "home-1")
    key, ends_s = KEYS.issue(lender, 3600.0, NOW)
    assert KEYS.check(key, NOW) == (lender, ends_s)
    for role in ("submitter", "operator"):
        assert KEYS.check(key.replace(".peer.", f".{role}."), NOW) is None
    with pytest.raises(AdmissionError, match="may not look"):
        keys().issue(Party(PartyRole.BROKER, "home-1"), 3600.0, NOW)


# ---------------------------------------------------------------- certificates


def test_its_own_certificate_stays_and_follows_the_host(tmp_path: Path):
    first = fingerprint(own_certificate(tmp_path, "shoal.example.org", utc(NOW))[0])
    again = own_certificate(tmp_path, "shoal.example.org", utc(NOW + 86400))
    assert fingerprint(again[0]) == first
    assert again[1].stat().st_mode & 0o077 == 0
    assert fingerprint(own_certificate(tmp_path, "192.0.2.7", utc(NOW))[0]) != first
    again[0].write_text("damaged")
    assert fingerprint(own_certificate(tmp_path, "192.0.2.7", utc(NOW))[0]) != first


def test_a_folder_without_the_owners_certificate_is_named(tmp_path: Path):
    (tmp_path / "fullchain.pem").write_text("x")
    with pytest.raises(FileNotFoundError) as caught:
        owners_certificate(tmp_path)
    assert caught.value.filename == str(tmp_path / "privkey.pem")


# ---------------------------------------------------------------- digests


class Story:
    """Events of one run, numbered."""

    def __init__(self, since_s: float = -1.0, tokens: int = 10) -> None:
        self.totals = MetricTotals()
        self.digest = Digest(tokens, self.totals, since_s)
        self._number = 0

    def say(self, at_s: float = 0.0, term: int = 0, **kind: object) -> None:
        self.digest.add(RunEvent(number=self._number, at_s=at_s, term=term, **kind))
        self._number += 1

    def state(self, phase: Phase, code: str = "", text: str = "", at_s: float = 0.0) -> None:
        reason = Reason(code=code, text=text) if code else None
        self.say(at_s, state=RunState(phase=phase, reason=reason))

    def step(self, step: int, loss: float = 1.0, at_s: float = 0.0, **more: object) -> None:
        self.say(at_s, step=StepDone(step=step, outcome=Outcome(loss=loss), **more))


@given(st.lists(st.floats(width=32), min_size=1, max_size=2500))
def test_a_curve_stays_short_keeps_its_ends_and_its_order(losses: list[float]):
    story = Story()
    for i, loss in enumerate(losses):
        story.step(i, loss)
    row = json.loads(json.dumps(story.digest.row(), allow_nan=False))
    finite = [(i, x) for i, x in enumerate(losses) if math.isfinite(x)]
    points = row["losses"]
    assert len(points) <= min(len(finite), MOST_POINTS)
    assert [p[0] for p in points] == sorted({p[0] for p in points})
    for i, value in points:
        assert value == pytest.approx(losses[i], rel=1e-5, abs=1e-30)
    if finite:
        assert (points[0][0], points[-1][0]) == (finite[0][0], finite[-1][0])
    assert ("loss" in row) == math.isfinite(losses[-1])


def test_losses_of_holders_are_counted_and_told_with_their_reason():
    story = Story()
    story.state(WAITING, "plan", "is planned over 3 peers")
    story.state(BUILDING, "building", "2 peers fetch")
    story.state(RUNNING)
    story.state(BUILDING, "stream", "peer a was lost")  # another took its part
    story.state(RUNNING)
    story.state(WAITING, "deadline", "no progress")  # all are planned anew
    story.state(BUILDING, "building", "2 peers fetch")
    story.state(WAITING, "restart", "the broker was started again while it was built")
    story.state(BUILDING, "building", "2 peers fetch")
    story.state(RUNNING)
    story.state(BUILDING, "moved", "a better plan")
    story.state(RUNNING)
    story.state(WAITING, "paused", "paused at step 3")
    story.state(DONE, "done", "")
    assert story.totals.recoveries == {"stream": 1, "deadline": 1}
    row = story.digest.row()
    assert row["recoveries"] == 2
    assert [m["text"] for m in row["moments"] if m["kind"] == "loss"] == [
        "building: peer a was lost",
        "waiting: no progress",
    ]


def test_only_what_happened_since_the_start_is_counted():
    story = Story(since_s=5.0)
    use = LinkUse(source="a", destination="b", role="activation", bytes=7)
    story.step(0, at_s=4.0, links=[use])
    story.step(1, at_s=5.0, links=[use])  # the newest before the broker died
    assert (story.totals.steps, story.totals.sent_bytes) == (0, {})
    story.step(2, at_s=6.0, links=[use, use], again_bytes=3)
    totals = story.totals
    assert (totals.steps, totals.tokens, totals.again_bytes) == (1, 10, 3)
    assert totals.sent_bytes == {"activation": 14}
    assert [p[0] for p in story.digest.row()["losses"]] == [0, 1, 2]


def test_speed_and_share_of_compute_are_those_of_the_present_plan():
    story = Story(tokens=100)
    story.step(0, seconds=50.0)
    story.say(plan=Plan(stages=[StageSlot(start=0, stop=3, holders=["a", "b"])]))
    assert story.digest.tokens_per_s == 0
    for i in range(1, 4):
        story.step(i, seconds=2.0, compute_s=1.0, sent_bytes=6)
    row = story.digest.row()
    assert (row["step_s"], row["tokens_per_s"]) == (2.0, 50.0)
    assert row["busy"] == 0.25  # one second of two in two
    assert row["sent_bytes_per_step"] == 6.0
    assert row["plans"][0]["stages"] == [{"operators": [0, 3], "holders": ["a", "b"]}]


def test_a_chatty_run_keeps_its_newest_moments_cut_short():
    story = Story()
    for i in range(3 * MOST_MOMENTS):
        story.say(note=f"{i} " + "x" * 5000)
    moments = story.digest.row()["moments"]
    assert len(moments) == MOST_MOMENTS
    assert moments[-1]["text"].startswith(f"{3 * MOST_MOMENTS - 1} ")
    assert all(len(m["text"]) <= 600 for m in moments)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ({"kind": "text", "length": 16}, 8 * 16),
        ({"kind": "text"}, 8 * 128),
        ({"kind": "arrays", "source": "x.npz"}, 8),
    ],
)
def test_tokens_of_a_step(data, wanted):
    table = {"version": 1, "model": {"factory": "m.py:f"}, "data": data, "train": {"steps": 1}}
    spec = RunSpec(job=Job.from_table(table).to_json(), microbatches=4, microbatch_size=2)
    assert tokens_per_step(spec) == wanted
    assert tokens_per_step(RunSpec(job="[]", microbatches=4, microbatch_size=2)) == 8
