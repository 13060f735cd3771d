"""[sync] kind = "federated" and [data.partition] of a job."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from shoal.job import Job, SettingsError, Training
from shoal.job.clients.client_options import FedBuffOptions, share_of
from shoal.job.clients.client_privacy import ClientPrivacy
from shoal.job.clients.local_work import LocalWork
from shoal.job.rounds import method_of

from .federated_jobs import BUFFERED, FLAG, IN_SHARES, MASKED, MASKED_TOP, PRIVATE, SHARES, job


def test_cohorts_follow_from_the_tables() -> None:
    found = job(sync={"per_round": "30%", "local": {"steps": 3}, "weight": "equal"})
    assert found.rounds is not None
    cohorts = found.rounds.cohorts
    assert cohorts is not None
    assert (cohorts.clients, cohorts.per_round, cohorts.labels) == (40, 12, "y")
    assert (cohorts.local.steps, cohorts.local.passes, cohorts.weight) == (3, 0, "equal")
    assert Job.from_json(found.to_json()) == found.without_places()
    assert found.training.batch == 8, "a client's"
    assert job(sync={"per_round": 7}).rounds.cohorts.per_round == 7  # type: ignore[union-attr]


def test_a_buffer_is_a_number_or_a_share_of_those_that_train_at_a_time() -> None:
    assert FedBuffOptions(buffer="30%").wanted(12) == 4, "rounded up"
    assert FedBuffOptions(buffer=12).wanted(12) == 12
    found = job(sync=BUFFERED)
    assert Job.from_json(found.to_json()) == found.without_places()
    assert method_of(found.sync.chosen).buffered


@pytest.mark.parametrize("text", ["0.1%", "0.05%", "33.3%", "12.000001%", "100.0%", "7%"])
def test_a_share_of_clients_is_exact_and_rounded_up(text: str) -> None:
    wanted = Fraction(text.removesuffix("%")) / 100
    for clients in (1, 12, 1000, 99_999, 10_000_000):
        found = share_of(text, clients)
        assert found >= wanted * clients > found - 1


@pytest.mark.parametrize(
    "text", ["0.0%", "100.1%", "1e1%", "1/2%", ".5%", "5.%", "-1%", "9" * 5000 + "%", "٣%"]
)
def test_what_is_no_share_of_clients_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="a share such as"):
        share_of(text, 100)


@pytest.mark.parametrize("key", ["passes", "steps"])
def test_no_client_works_for_longer_than_its_batches_fit_into_memory(key: str) -> None:
    assert job(sync={"local": {key: 2**20}}).sync.local == LocalWork(**{key: 2**20})
    with pytest.raises(SettingsError, match=rf"sync.local.{key}.*expected at most {2**20}"):
        job(sync={"local": {key: 2**40}})


def test_rounds_are_steps_of_the_run() -> None:
    by_rounds, by_steps = job(train={"rounds": 7}), job(train={"steps": 7})
    assert by_rounds.resolved(by_rounds.train.known_steps or 0) == by_steps.resolved(7)
    assert Job.from_json(by_rounds.to_json()) == by_rounds.without_places()


def test_an_aggregate_says_how_many_clients_may_be_wrong() -> None:
    krum = {"aggregate": "krum", "weight": "equal", "per_round": 20}
    found = job(sync=krum)
    assert found.rounds is not None
    cohorts = found.rounds.cohorts
    assert cohorts is not None
    assert (cohorts.byzantine, cohorts.by_client, cohorts.chooses) == (4, True, True)
    assert Job.from_json(found.to_json()) == found.without_places()
    nine = job(sync={**krum, "aggregate": "trimmed-mean", "byzantine": 9}).rounds
    assert nine is not None
    assert nine.cohorts is not None
    assert (nine.cohorts.byzantine, nine.cohorts.chooses) == (9, False)
    flag = job(sync=FLAG).rounds
    assert flag is not None
    assert flag.cohorts is not None
    assert (flag.cohorts.byzantine, flag.cohorts.by_client, flag.cohorts.chooses) == (0, True, True)
    # Of 20 clients what was taken down, came and is put side by side; the result; the version.
    assert found.rounds.exchange_bytes == 20 * (4 + 4 + 4) + 4 + 4


def test_what_clients_send_follows_from_the_tables() -> None:
    assert job().rounds.cohorts.sends.sparse is False  # type: ignore[union-attr]
    links = {"up": "normal:1Mbit,0.2Mbit", "latency": "50ms"}
    options = {"gamma": 3, "overlap_degree": 2, "alpha": 0.5}
    found = job(
        sync={
            "compression": "bcrs+opwa",
            "compression_options": options,
            "client_links": links,
        }
    )
    assert found.rounds is not None
    assert found.rounds.overlap == (3.0, 2)
    assert found.rounds.codec == "nonzero"
    assert Job.from_json(found.to_json()) == found.without_places()
    with_one_row = job(sync={"compression": "topk", "client_links": links}).rounds
    assert with_one_row is not None
    assert with_one_row.overlap is None
    assert found.rounds.exchange_bytes > with_one_row.exchange_bytes


def test_virtual_data_goes_to_peers_with_cohorts() -> None:
    found = job(sync={"virtual_data": "vhl", "vhl": {"l1": 0.5, "calibrate": {"steps": 9}}})
    assert found.rounds is not None
    assert found.rounds.cohorts is not None
    vhl = found.rounds.cohorts.vhl
    assert vhl is not None
    assert (vhl.alpha, vhl.l1, vhl.l2, vhl.temperature) == (1.0, 0.5, 0.1, 0.07)
    assert (vhl.calibrate.steps, vhl.calibrate.passes) == (9, 0)
    assert Training.from_json(found.training.to_json()) == found.training
    assert Job.from_json(found.to_json()) == found.without_places()
    without = job().rounds
    assert without is not None
    assert without.cohorts is not None
    assert without.cohorts.vhl is None


def test_what_one_of_many_is_planned_as_has_no_clients() -> None:
    whole = job(sync={"method": "fedadam", "options": {"lr": 0.1}})
    assert whole.decided("local", 1).rounds is not None
    assert whole.decided("local", 1).rounds.cohorts == whole.rounds.cohorts, "a run of one replica"
    one = whole.one_of_many
    assert one.rounds is not None
    assert one.rounds.cohorts is None
    assert one.data.partition is None


def test_clients_are_hidden_by_the_same_numbers_everywhere() -> None:
    found = job(sync=PRIVATE)
    assert found.rounds is not None
    privacy = found.rounds.privacy
    assert privacy is not None
    assert (privacy.clip, privacy.epsilon, privacy.delta, privacy.noise) == (1.0, 8.0, 1e-5, 0.0)
    assert Job.from_json(found.to_json()) == found.without_places()
    assert not found.rounds.keeps_given, "no contribution without noise is in a snapshot"
    plain = job(sync={"weight": "equal"}).rounds
    assert plain is not None
    assert plain.keeps_given
    assert plain.privacy is None


def test_shares_of_noise_are_for_the_fewest_that_may_be_in_a_sum() -> None:
    found = job(sync=IN_SHARES)
    assert found.rounds is not None
    assert found.rounds.cohorts is not None
    assert found.rounds.privacy is not None
    assert (found.rounds.privacy.where, found.rounds.cohorts.fewest) == ("distributed", 3)
    assert Job.from_json(found.to_json()) == found.without_places()
    for fewest in (3, 5):
        hidden = ClientPrivacy(**{**SHARES, "clip": 0.5, "noise": 4.0, "fewest": fewest})
        all_but_one = (fewest - 1) * hidden.share**2
        assert all_but_one == pytest.approx((4.0 * 0.5) ** 2), "who knows its own has less"
        assert hidden.step == hidden.share / 2**24
    plain = job(sync={"per_round": 5}).rounds
    assert plain is not None
    assert plain.cohorts is not None
    assert plain.cohorts.fewest == 1


def test_with_masks_all_send_the_same_numbers_and_the_last_move_is_kept() -> None:
    found, plain = job(sync=MASKED_TOP).rounds, job(sync=MASKED).rounds
    assert found is not None
    assert plain is not None
    assert found.cohorts is not None
    assert (found.cohorts.shares_positions, found.cohorts.own_positions) == (True, False)
    assert found.codec == "none"
    assert found.kept_bytes == plain.kept_bytes + 4
    apart = job(sync={"compression": "topk"}).rounds
    assert apart is not None
    assert apart.cohorts is not None
    assert (apart.cohorts.shares_positions, apart.cohorts.own_positions) == (False, True)
    assert (apart.codec, apart.results) == ("nonzero", "")
    back = job(sync={"compression": "topk"}, codec={"sync": "int8"}).rounds
    assert back is not None
    assert (back.codec, back.results) == ("nonzero", "int8")


def test_what_is_masked_is_in_no_snapshot_and_takes_more_room() -> None:
    found, plain = (
        job(sync={"secure": True, "per_round": 3}).rounds,
        job(sync={"per_round": 3}).rounds,
    )
    assert found is not None
    assert plain is not None
    assert (found.secure, found.keeps_given) == (True, False)
    assert (plain.secure, plain.keeps_given) == (False, True)
    assert found.exchange_bytes == plain.exchange_bytes + 16
    assert found.cohorts is not None
    assert replace(found, cohorts=replace(found.cohorts, secure=False)) == plain
