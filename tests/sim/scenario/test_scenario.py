"""A scenario file gives a planner its peers and its network, or one clear error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.benchmarks.planning.redraw import FACTOR, redraw
from shoal.job import Job, SettingsError
from shoal.sim.scenario.devices import DEVICES
from shoal.sim.scenario.scenario import SCENARIOS, Scenario
from shoal.sim.scenario.tables import MOST_PEERS, LinkTable, PeerTable, Place

HEAD = 'version = 1\njob = "job.toml"\n'
TWO = '[[peers]]\nname = "a"\nplace = "eu"\n[[peers]]\nname = "b"\nplace = "us"\n'  # 6 lines
LINK = '[[links]]\nfrom = "eu"\nto = "us"\nlatency = "50ms"\nbandwidth = "20Mbit"\n'
TESTBEDS = (8, 24, 48)


def read(tmp_path: Path, body: str, head: str = HEAD) -> Scenario:
    path = tmp_path / "home.toml"
    path.write_text(head + body)
    return Scenario.from_toml(path)


def problem(tmp_path: Path, body: str, head: str = HEAD) -> str:
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, body, head)
    return str(caught.value).removeprefix(str(tmp_path) + "/")


def link(a: str, b: str, latency: str, bandwidth: str = "20Mbit", both: bool = True) -> str:
    more = "" if both else "both = false\n"
    ends = f'[[links]]\nfrom = "{a}"\nto = "{b}"\n'
    return f'{ends}latency = "{latency}"\nbandwidth = "{bandwidth}"\n{more}'


SNAPSHOT = 'at_step = 3\nphase = "snapshot"'


def fault(do: str, more: str = "at_step = 3", who: str = 'who = ["a"]') -> str:
    return f'[[faults]]\ndo = "{do}"\n{who}\n{more}\n'


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


# ---------------------------------------------------------------- what is wrong with a file


@pytest.mark.parametrize(
    ("body", "line", "says"),
    [
        (TWO + LINK + '[[peers]]\nname = "c"\nplac = "eu"\n', 16, 'did you mean "place"?'),
        (TWO + "up = 20\n" + LINK, 9, "`peers[1].up` is not readable: 20 has no unit"),
        (
            TWO + 'device = "rtx-490"\n' + LINK,
            9,
            'did you mean "rtx-4090"? (known: cpu-1, gtx-1060',
        ),
        (TWO + 'device = "rtx-3060"\nmemory = "24GiB"\n', 10, "at most 12884901888B, all that rtx"),
        (
            TWO + 'device = {flops = nan, memory_bandwidth = "1GB/s"}\n',
            9,
            ".flops` is nan: expected",
        ),
        (
            TWO + 'device = {flops = inf, memory_bandwidth = "1GB/s"}\n',
            9,
            ".flops` is inf: expected",
        ),
        (TWO + "device = {flops = 1e12}\n", 9, "`peers[1].device.memory_bandwidth` is missing"),
        (TWO + 'up = "0Mbit"\n' + LINK, 9, "`peers[1].up` is 0.0B/s: expected more than 0"),
        (TWO + 'memory = "0GiB"\n' + LINK, 9, "`peers[1].memory` is 0B: expected more than 0"),
        (TWO + 'memory = "1e999GiB"\n' + LINK, 9, "is too large"),
        (TWO + link("eu", "us", "1ms", "0Mbit"), 13, "`links[0].bandwidth` is 0.0B/s: expected"),
        (TWO + link("eu", "us", "1ms", "-8Mbit"), 13, '"-8Mbit" is not a speed'),
        (TWO + link("eu", "us", "1ms", "nanMbit"), 13, '"nanMbit" is not a speed'),
        (TWO + link("eu", "us", "1ms", "1e999Mbit"), 13, '"1e999Mbit" is too large'),
        (TWO + link("eu", "us", "-1ms"), 12, '"-1ms" is not a time'),
        (TWO + link("eu", "us", "inf"), 12, '"inf" is not a time'),
        (
            TWO + link("eu", "usa", "1ms"),
            11,
            'neither a peer nor a place where one is; did you mean "',
        ),
        (TWO + link("eu", "eu", "1ms"), 11, "[places.eu] says what holds inside a place"),
        (
            TWO + '[[links]]\nform = "eu"\n',
            10,
            '`links[0].form` is not a known key; did you mean "from',
        ),
        (TWO + '[[links]]\nto = "eu"\n', 9, "`links[0].from` is missing: expected a string"),
        (TWO + "[places.ue]\n" + LINK, 9, "where no peer is; did you mean"),
        (TWO + LINK + '[broker]\nplace = "mars"\n', 15, '`broker.place` is "mars"'),
        (TWO, None, '`links` lack one from place "eu" to place "us", where peers "a" and "b" are'),
        (
            TWO + link("eu", "us", "1ms", both=False),
            9,
            '`links` lack one from place "us" to place "eu"',
        ),
        (
            TWO + LINK + link("us", "eu", "51ms"),
            17,
            'and 0.05s in the link from "eu" to "us" (numb',
        ),
        (
            TWO + LINK + link("eu", "us", "50ms", "30Mbit"),
            18,
            '`links[1].bandwidth` is 3750000.0B/s from "eu" to "us", and 2500000.0B/s in the link',
        ),
        (
            TWO + LINK + link("us", "eu", "51ms", both=False),
            17,
            "expected one number for each direc",
        ),
        (
            TWO + LINK + link("a", "us", "1ms") + link("eu", "b", "1ms"),
            19,
            'covers peer "a" to peer "b", and so does link number 2; neither is more specific',
        ),
        (
            TWO + '[[peers]]\nname = "b"\nplace = "eu"\n',
            10,
            'the name "b", which number 2 of [[peers',
        ),
        (
            '[[peers]]\nname = "h-{1..3}"\nplace = "eu"\n[[peers]]\nname = "h-2"\nplace = "eu"\n',
            7,
            '`peers[1].name` gives the name "h-2", which number 1 of [[peers]] has already',
        ),
        (TWO + '[[peers]]\nname = "eu"\nplace = "us"\n', 10, "links could not tell them apart"),
        (
            '[[peers]]\nname = "home-{1..1000000}"\nplace = "eu"\n',
            4,
            f"its range is 1000000 peers: expected at most {MOST_PEERS}",
        ),
        (
            f'[[peers]]\nname = "x-{{1..{MOST_PEERS}}}"\nplace = "eu"\n'
            '[[peers]]\nname = "y"\nplace = "eu"\n',
            7,
            f"makes {MOST_PEERS + 1} peers: expected at most {MOST_PEERS} in all",
        ),
        ('[[peers]]\nname = "home-{4..1}"\nplace = "eu"\n', 4, "ends before it starts: 4 to 1"),
        ('[[peers]]\nname = "home-{1..}"\nplace = "eu"\n', 4, 'one range such as "home-{1..4}"'),
        ('[[peers]]\nname = "{1..2}-{1..2}"\nplace = "eu"\n', 4, "at most one range"),
        ('[[peers]]\nname = ""\nplace = "eu"\n', 4, '`peers[0].name` is "": expected letters'),
        ("peers = []\n", 3, "`peers` is empty: expected at least one [[peers]]"),
        (
            "network = 'set:mars'\n" + TWO,
            3,
            'no network set is named "mars"; known: skippipe_gcp_12',
        ),
        ("network = 'mars'\n" + TWO, 3, '`network` is "mars": expected "set:NAME"'),
        (
            "network = 'set:dtfm_world_10'\n" + TWO,
            6,
            '`peers[0].place` is "eu", which is no place of',
        ),
        # Line 13 is the last of LINK, and line 14 the head of what follows it.
        (
            TWO + LINK + "loss = 1.0\n",
            14,
            "`links[0].loss` is 1.0: expected a share, from 0 to less",
        ),
        (TWO + LINK + 'jitter = "-1ms"\n', 14, '"-1ms" is not a time'),
        (TWO + LINK + "[places.eu]\nat = [91, 0]\n", 15, "expected [latitude, longitude]"),
        (TWO + 'stays = "0s"\n' + LINK, 9, '`peers[1].stays` is 0s: expected more, or ""'),
        (TWO + "price_per_hour = -1\n" + LINK, 9, "`peers[1].price_per_hour` is -1.0: expected"),
        ("time_scale = 0.0\n" + TWO + LINK, 3, "`time_scale` is 0.0: expected more than 0"),
        (
            'mode = "ghost"\ntime_scale = 2.0\n' + TWO + LINK,
            4,
            "`time_scale` is 2.0: expected 1.0 where `mode`",
        ),
        ('mode = "vitrual"\n' + TWO + LINK, 3, 'expected "real" | "virtual" | "ghost"'),
        (TWO + LINK + fault("kil"), 15, '`faults[0].do` is "kil": expected "kill" | "stop"'),
        (
            TWO + LINK + fault("kill", who='who = ["c"]'),
            16,
            "which no peer is called and none fits",
        ),
        (TWO + LINK + fault("kill", who='who = ["place:eur"]'), 16, "none fits; did you mean"),
        (TWO + LINK + fault("kill", who='who = ["memory>=8"]'), 16, '"8" has no unit'),
        (TWO + LINK + fault("kill", who='who = ["memory>=8GiB"]'), 16, "none fits"),
        (TWO + LINK + fault("kill", who=""), 14, '`faults[0].who` has 0 of "kill": expected at le'),
        (TWO + LINK + fault("kill", who='who = ["broker"]'), 16, "names the broker"),
        (TWO + LINK + fault("kill", ""), 14, "at_round, and given are none: expected exactly one"),
        (TWO + LINK + fault("kill", 'at = "1s"\nat_step = 1'), 17, "given are at and at_step: exp"),
        (TWO + LINK + fault("kill", "at_round = -1"), 17, "`faults[0].at_round` is -1: expected"),
        (TWO + LINK + fault("kill", 'at_round = 1\nphase = "clip"'), 18, "expected `at_step` to"),
        (TWO + LINK + fault("kill", "at_step = -1"), 17, "`faults[0].at_step` is -1: expected"),
        (
            TWO + LINK + fault("kill", 'at = "1s"\nphase = "clip"'),
            18,
            "expected `at_step` to say of which",
        ),
        (TWO + LINK + fault("kill", 'at = "11min"'), 17, "660.0s, after `limit` (600.0s): never"),
        (
            TWO + LINK + fault("kill", 'at_step = 1\nwith = ["b"]'),
            18,
            '`faults[0].with` says nothing of "kill": expected it with cut-off, slow, flap',
        ),
        (
            TWO + LINK + fault("kill", 'at_step = 1\nfor = "3s"'),
            18,
            '`faults[0].for` says nothing of "kill": expected it with stop, cut-off',
        ),
        (TWO + LINK + fault("slow"), 14, "`faults[0].factor` is 1.0, which slows nothing"),
        (
            TWO + LINK + fault("cut-off", 'at_step = 1\nwith = ["eu"]'),
            18,
            '`faults[0].with` is "a", as `who` is',
        ),
        (TWO + LINK + "[churn]\nfail_per_hour = -1\n", 15, "`churn.fail_per_hour` is -1.0"),
        (TWO + LINK + '[churn]\nreturn_after = "9s"\n', 15, "expected it with `fail_per_hour`"),
        (
            TWO + LINK + '[churn]\nfail_per_hour = 1\ntrace = "a.csv"\n',
            16,
            "`churn.trace` says when peers are gone, and so does",
        ),
        (TWO + LINK + "[expect]\ngoodput_at_least = 95\n", 15, "is 95.0: expected a share"),
        (TWO + LINK + "[expect]\nloss_below = nan\n", 15, "`expect.loss_below` is nan"),
        (TWO + LINK + "[expect]\nloss_bellow = 3.0\n", 15, 'did you mean "loss_below"?'),
        ('[[peers]]\nname = "broker"\nplace = "eu"\n', 4, "what faults call the broker"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, body: str, line: int | None, says: str
) -> None:
    message = problem(tmp_path, body)
    assert message.startswith("home.toml: " if line is None else f"home.toml:{line}: ")
    assert says in message


@pytest.mark.parametrize(
    ("key", "body"),
    [
        ("peers[1].data", TWO + 'data = ["mnist"]\n' + LINK),
        ("faults[1].phase", TWO + LINK + fault("kill") + fault("kill", SNAPSHOT)),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path: Path, key: str, body: str) -> None:
    assert f"`{key}` is " in problem(tmp_path, body)


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


# ---------------------------------------------------------------- expansion


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    places = [f"place-{k}" for k in range(draw(st.integers(1, 4)))]
    at = draw(st.lists(st.sampled_from(places), min_size=1, max_size=8))
    peers = tuple(PeerTable(name=f"p{i}", place=place) for i, place in enumerate(at))
    used = list(dict.fromkeys(at))
    pairs = [(a, b) for i, a in enumerate(used) for b in used[:i]]
    names = [p.name for p in peers]
    pairs += [
        (a, b)
        for a, b in draw(st.sets(st.tuples(st.sampled_from(names), st.sampled_from(names))))
        if a < b
    ]
    number = st.integers(1, 1000)
    links = tuple(
        LinkTable.from_table(
            {
                "from": a,
                "to": b,
                "latency": f"{draw(number)}ms",
                "bandwidth": f"{draw(number)}Mbit",
            }
        )
        for a, b in pairs
    )
    inside = {name: Place.from_table({"latency": f"{draw(number)}us"}) for name in used}
    return Scenario(version=1, job="job.toml", peers=peers, links=links, places=inside)


@given(scenarios())
def test_links_in_both_directions_give_symmetric_positive_matrices_without_gaps(
    scenario: Scenario,
) -> None:
    network = scenario.network()
    off = ~np.eye(len(network), dtype=bool)
    assert (network.latency_s[off] > 0).all()
    assert (network.bandwidth[off] > 0).all()
    assert np.isfinite(network.latency_s).all()
    assert np.isfinite(network.bandwidth[off]).all()
    assert (network.latency_s == network.latency_s.T).all()
    assert (network.bandwidth == network.bandwidth.T).all()


@given(scenarios(), st.integers(0, 2**32))
def test_a_redrawn_network_is_near_the_stated_one_and_the_same_for_the_same_seed(
    scenario: Scenario, seed: int
) -> None:
    stated, drawn = scenario.network(), redraw(scenario, seed).network()
    again = redraw(scenario, seed).network()
    assert drawn.peers == stated.peers
    assert (drawn.latency_s == again.latency_s).all()
    assert (drawn.bandwidth == again.bandwidth).all()
    assert (drawn.up == again.up).all()
    off = ~np.eye(len(stated), dtype=bool)
    ratio = drawn.latency_s[off] / stated.latency_s[off]
    assert ((ratio >= 0.999 / FACTOR) & (ratio <= 1.001 * FACTOR)).all()
    assert ((drawn.bandwidth[off] >= 1e6) & (drawn.bandwidth[off] <= 1.25e9)).all()
    assert (drawn.latency_s == drawn.latency_s.T).all()


@given(st.text(max_size=200))
def test_any_text_gives_one_clear_error(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "home.toml"
        path.write_bytes((HEAD + text).encode("utf-8", "surrogatepass"))
        with pytest.raises(SettingsError):
            Scenario.from_toml(path)


# ---------------------------------------------------------------- the testbeds


@pytest.mark.parametrize("size", TESTBEDS)
def test_a_testbed_has_clusters_from_slow_homes_to_fast_laboratories(size: int) -> None:
    scenario = Scenario.from_toml(SCENARIOS / f"testbed-{size}.toml")
    assert len(scenario.offers()) == size
    assert scenario.job_path.is_file()
    assert Job.from_toml(scenario.job_path).name == "gpt_bytes"
    off = ~np.eye(size, dtype=bool)
    rates = scenario.network().rates()[off] * 8
    assert rates.min() == 8e6
    assert rates.max() == 10e9
    for peer in scenario.peers:
        assert peer.up <= peer.down
        assert peer.memory == peer.hardware.memory_bytes  # in full, as published


@pytest.mark.parametrize("size", TESTBEDS)
def test_redrawing_a_testbed_changes_its_links_only(size: int) -> None:
    scenario = Scenario.from_toml(SCENARIOS / f"testbed-{size}.toml")
    first, second = redraw(scenario, 1), redraw(scenario, 2)
    assert first.offers() == second.offers() == scenario.offers()
    assert (first.network().bandwidth != second.network().bandwidth).any()
    assert (first.network().up != scenario.network().up).any()
    for peer in first.peers:
        assert peer.up <= peer.down
    off = ~np.eye(size, dtype=bool)
    rates = first.network().rates()[off] * 8
    assert rates.min() >= 8e6
    assert rates.max() <= 10e9


def test_the_device_table_is_in_the_order_of_what_cards_do() -> None:
    speeds = [
        DEVICES[name].speeds.product for name in ("cpu-1", "gtx-1060", "rtx-3090", "rtx-4090")
    ]
    assert speeds == sorted(speeds)
    for name, device in DEVICES.items():
        assert 0 < device.speeds.product < device.flops, name
        assert 0 < device.speeds.special < device.speeds.memory < device.memory_bandwidth, name
