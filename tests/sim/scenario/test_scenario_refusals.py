"""What is wrong with a scenario file is one clear error with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.job import SettingsError
from shoal.sim.scenario.scenario import Scenario
from shoal.sim.scenario.tables import MOST_PEERS

from .scenario_files import HEAD, LINK, TWO, fault, link, problem

SNAPSHOT = 'at_step = 3\nphase = "snapshot"'


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


@given(st.text(max_size=200))
def test_any_text_gives_one_clear_error(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "home.toml"
        path.write_bytes((HEAD + text).encode("utf-8", "surrogatepass"))
        with pytest.raises(SettingsError):
            Scenario.from_toml(path)
