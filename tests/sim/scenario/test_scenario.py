"""What a scenario file means: peers, network, faults, and changes to its job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.job import Job, SettingsError
from shoal.sim.scenario.devices import DEVICES
from shoal.sim.scenario.scenario import Scenario

from .scenario_files import HEAD, LINK, TWO, fault, link, problem, read

# ---------------------------------------------------------------- what a file means


def test_a_file_with_the_required_keys_only_works(tmp_path: Path) -> None:
    scenario = read(tmp_path, '[[peers]]\nname = "home-{1..3}"\nplace = "eu"\n')
    assert scenario.name == "home"
    assert scenario.job_path == tmp_path / "job.toml"
    network = scenario.network()
    assert network.peers == ("home-1", "home-2", "home-3")
    off = ~np.eye(3, dtype=bool)
    assert network.latency_s[off] == pytest.approx(1e-3)
    assert (network.bandwidth[off] == 125e6).all()
    assert (network.up == 125e6).all()
    assert (network.down == 125e6).all()


def test_offers_carry_what_the_file_says(tmp_path: Path) -> None:
    body = (
        '[[peers]]\nname = "a"\nplace = "eu"\ndevice = "rtx-3060"\nmemory = "12GiB"\nops = "core"\n'
        '[[peers]]\nname = "b"\nplace = "eu"\n'
        'device = {flops = 1e12, memory_bandwidth = "100GB/s", overhead = "20us"}\n'
    )
    scenario = read(tmp_path, body)
    first, second = scenario.offers()
    assert (first.peer, first.name, first.place) == ("a", "a", "eu")
    assert first.device_memory_bytes == first.host_memory_bytes == 12 * 2**30
    assert first.operator_set == "core"
    assert first.speeds == DEVICES["rtx-3060"].speeds
    assert first.flops_per_s == DEVICES["rtx-3060"].speeds.product
    assert second.speeds is not None
    assert second.speeds.call_s == pytest.approx(20e-6)
    assert 0.1e12 < second.speeds.product < 1e12
    assert 10e9 < second.speeds.special < second.speeds.memory < 100e9


def test_a_link_holds_for_both_directions_unless_it_says_otherwise(tmp_path: Path) -> None:
    one_way = link("eu", "us", "50ms", both=False) + link("us", "eu", "70ms", "8Mbit", both=False)
    network = read(tmp_path, TWO + one_way).network()
    assert network.latency_s[0, 1] == pytest.approx(0.05)
    assert network.latency_s[1, 0] == pytest.approx(0.07)
    assert network.bandwidth[1, 0] == 1e6
    both = read(tmp_path, TWO + LINK).network()
    assert both.latency_s[0, 1] == both.latency_s[1, 0] == pytest.approx(0.05)


def test_the_more_specific_link_wins(tmp_path: Path) -> None:
    peers = (
        '[[peers]]\nname = "a{1..2}"\nplace = "eu"\n[[peers]]\nname = "b{1..2}"\nplace = "us"\n'
        '[places.eu]\nlatency = "2ms"\n'
    )
    links = (
        link("a1", "b2", "9ms") + link("a1", "us", "40ms") + link("eu", "us", "50ms")
    )  # the order in the file does not count
    network = read(tmp_path, peers + links + link("a1", "a2", "3ms")).network()
    ms = np.round(network.latency_s * 1000, 6)
    assert ms.tolist() == [[0, 3, 40, 9], [3, 0, 50, 50], [40, 50, 0, 1], [9, 50, 1, 0]]


def test_places_need_no_link_where_all_their_peers_have_their_own(tmp_path: Path) -> None:
    assert read(tmp_path, TWO + link("a", "b", "50ms")).network().latency_s[1, 0] > 0
    assert read(tmp_path, TWO + link("a", "us", "50ms")).network().latency_s[1, 0] > 0


def test_the_broker_is_the_last_end_of_the_whole_network(tmp_path: Path) -> None:
    body = TWO + link("eu", "us", "50ms", both=False) + link("us", "eu", "70ms", both=False)
    scenario = read(tmp_path, body + '[broker]\nplace = "us"\nup = "8Mbit"\n')
    whole = scenario.wide().network
    assert whole.peers == ("a", "b", "broker")
    assert whole.latency_s[2].tolist() == pytest.approx([0.07, 0.001, 0])
    assert whole.latency_s[:, 2].tolist() == pytest.approx([0.05, 0.001, 0])
    assert (whole.up[2], whole.down[2]) == (1e6, 125e6)
    alone = read(tmp_path, body).wide().network  # with the first peer
    assert alone.latency_s[2].tolist() == pytest.approx([0.001, 0.05, 0])


def test_the_broker_has_its_neighbours_links_where_no_link_says_more(tmp_path: Path) -> None:
    whole = read(tmp_path, TWO + link("a", "us", "50ms")).wide().network
    assert whole.latency_s[2].tolist() == pytest.approx([0.001, 0.05, 0])


def test_a_broker_where_no_peer_is_needs_links(tmp_path: Path) -> None:
    body = TWO + LINK + '[places.dc]\n[broker]\nplace = "dc"\n'
    assert 'from place "eu" to place "dc"' in problem(tmp_path, body)
    links = link("eu", "dc", "5ms") + link("us", "dc", "6ms")
    whole = read(tmp_path, body + links).wide().network
    assert whole.latency_s[2].tolist() == pytest.approx([0.005, 0.006, 0])


def test_jitter_and_loss_are_those_of_the_link_that_holds(tmp_path: Path) -> None:
    peers = TWO + '[[peers]]\nname = "c"\nplace = "us"\n'
    links = LINK + 'jitter = "5ms"\n' + link("a", "c", "9ms") + "loss = 0.01\n"
    wide = read(tmp_path, peers + links).wide()
    assert np.round(wide.jitter_s[:3, :3] * 1000, 9).tolist() == [[0, 5, 0], [5, 0, 0], [0, 0, 0]]
    assert wide.loss[:3, :3].tolist() == [[0, 0, 0.01], [0, 0, 0], [0.01, 0, 0]]
    assert read(tmp_path, TWO + LINK).wide().jitter_s.tolist() == np.zeros((3, 3)).tolist()


def test_the_same_numbers_twice_are_no_contradiction(tmp_path: Path) -> None:
    again = link("us", "eu", "0.05s", "2.5MB/s")
    assert read(tmp_path, TWO + LINK + again).network().latency_s[0, 1] == pytest.approx(0.05)


def test_a_network_set_lies_beneath_places_and_links(tmp_path: Path) -> None:
    head = HEAD + 'network = "set:dtfm_case_4_worldwide:traffic_control"\n'
    peers = "".join(
        f'[[peers]]\nname = "{p.lower()}-{{1..2}}"\nplace = "{p}"\n'
        for p in ("Oregon", "London", "Ireland")
    )
    network = read(tmp_path, peers + link("London", "Ireland", "5ms"), head).network()
    assert network.latency_s[0, 1] == pytest.approx(0.010)
    assert network.latency_s[0, 2] == network.latency_s[2, 0] == pytest.approx(0.136)
    assert network.bandwidth[0, 2] == 52500000
    assert network.latency_s[2, 4] == network.latency_s[4, 2] == pytest.approx(0.005)


def test_faults_churn_and_expectations_are_what_the_file_says(tmp_path: Path) -> None:
    scenario = read(
        tmp_path,
        'mode = "virtual"\nlimit = "1h"\n'
        + TWO
        + 'owner = "ann"\nmemory = "8GiB"\njoins = "10s"\nstays = "4h"\nprice_per_hour = 0.5\n'
        + LINK
        + 'jitter = "5ms"\nloss = 0.01\n[places.eu]\nat = [47.4, 8.5]\n'
        + fault("kill", 'at_step = 20\nphase = "backward"')
        + fault("cut-off", 'at = "30s"\nwith = ["us", "broker"]\nfor = "1min"')
        + fault("slow", 'at = "1s"\nfactor = 10', who='who = ["owner:a*"]')
        + "[churn]\nfail_per_hour = 0.5\n[expect]\nloss_below = 3.0\n",
    )
    kill, cut, slow = scenario.faults
    assert (kill.at, kill.at_step, kill.phase) == (None, 20, "backward")
    assert (cut.at, cut.for_s, cut.with_) == (30.0, 60.0, ("us", "broker"))
    assert scenario.selected(cut.with_) == ("b", "broker")
    assert (slow.factor, scenario.selected(slow.who)) == (10.0, ("b",))
    assert (scenario.churn.fail_per_hour, scenario.churn.return_after) == (0.5, 60.0)
    assert scenario.expect.loss_below == 3.0
    assert (scenario.peers[1].joins, scenario.peers[1].stays) == (10.0, 4 * 3600.0)
    assert [scenario.price(s) for s in (5.0, 10.0 + 3600.0, 1e6)] == [0.0, 0.5, 2.0]
    assert scenario.places["eu"].at == (47.4, 8.5)


def test_selectors_pick_by_name_place_owner_and_memory(tmp_path: Path) -> None:
    scenario = read(
        tmp_path,
        '[[peers]]\nname = "home-{1..3}"\nplace = "eu"\nowner = "ann"\n'
        '[[peers]]\nname = "lab"\nplace = "eu"\nmemory = "16GiB"\n',
    )
    for selectors, picked in (
        (["home-?"], "home-1 home-2 home-3"),
        (["lab", "home-2"], "home-2 lab"),  # in the peers' order
        (["eu"], "home-1 home-2 home-3 lab"),
        (["place:e*"], "home-1 home-2 home-3 lab"),
        (["owner:ann"], "home-1 home-2 home-3"),
        (["memory>=10GiB"], "lab"),
        ([], ""),
    ):
        assert scenario.selected(selectors) == tuple(picked.split())


def test_a_job_may_be_given_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('version = 1\n[[peers]]\nname = "a"\nplace = "eu"\n')
    assert Scenario.from_toml(path, tmp_path / "mine.toml").job_path == tmp_path / "mine.toml"
    with pytest.raises(SettingsError, match="`job` is missing"):
        Scenario.from_toml(path)


def test_a_default_written_out_is_not_refused(tmp_path: Path) -> None:
    body = (
        'mode = "real"\nlimit = "600s"\ntime_scale = 1.0\nnetwork = ""\n'
        + TWO
        + 'nat = "open"\njoins = "0s"\nstays = ""\nprice_per_hour = 0.0\n'
        + LINK
        + 'jitter = "0ms"\nloss = 0.0\nboth = true\n[churn]\nreturn_after = "1min"\n[expect]\n'
        '[broker]\nplace = "us"\nup = "1Gbit"\n'
    )
    assert len(read(tmp_path, body).peers) == 2


def test_the_device_table_is_in_the_order_of_what_cards_do() -> None:
    speeds = [
        DEVICES[name].speeds.product for name in ("cpu-1", "gtx-1060", "rtx-3090", "rtx-4090")
    ]
    assert speeds == sorted(speeds)
    for name, device in DEVICES.items():
        assert 0 < device.speeds.product < device.flops, name
        assert 0 < device.speeds.special < device.speeds.memory < device.memory_bandwidth, name


# ---------------------------------------------------------------- another job


def job(**train: object) -> Job:
    return Job(model="a:b", batch=8, name="mine", **(train or {"steps": 5}))  # type: ignore[arg-type]


def test_overrides_take_the_place_of_keys_and_leave_the_others(tmp_path: Path) -> None:
    tables = '[job_overrides.train]\nlr = 0.5\n[job_overrides.codec]\ndefault = "lossless"\n'
    scenario = read(tmp_path, TWO + LINK + tables)
    module = object()
    given = replace(job(), module=module, folder=tmp_path)
    found = scenario.adjusted(given)
    assert (found.train.lr, found.train.batch, found.train.steps) == (0.5, 8, 5)
    assert found.codec.default == "lossless"
    assert (found.name, found.folder) == ("mine", tmp_path)
    assert found.module is module
    assert read(tmp_path, TWO + LINK).adjusted(given) is given


def test_another_length_takes_the_place_of_the_jobs_whatever_it_is_given_as(tmp_path: Path) -> None:
    scenario = read(tmp_path, "job_overrides = {train = {passes = 3}}\n" + TWO + LINK)
    assert scenario.adjusted(job(tokens=999)).train.passes == 3
    assert scenario.adjusted(job(tokens=999)).train.tokens is None


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("{codec = {defualt = 'none'}}", "`job_overrides.codec.defualt` is not a known key"),
        ("{train = {lr = 'fast'}}", "`job_overrides.train.lr`"),
        ("{trian = {lr = 1.0}}", "`job_overrides.trian` is not a known key"),
        ("{codec = 3}", "`job_overrides.codec`"),
    ],
)
def test_what_no_job_can_have_is_named(tmp_path: Path, table: str, says: str) -> None:
    scenario = read(tmp_path, f"job_overrides = {table}\n" + TWO + LINK)
    with pytest.raises(SettingsError) as caught:
        scenario.adjusted(job())
    assert says in str(caught.value)
