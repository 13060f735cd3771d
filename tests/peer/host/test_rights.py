"""peer.toml: what the owner wrote counts, and nothing in it is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.job.settings import SettingsError
from shoal.peer.host.rights import OwnData, peer_toml, read_rights


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "shoal").mkdir()
    return tmp_path / "shoal" / "peer.toml"


def test_without_a_file_nothing_is_limited(config: Path) -> None:
    rights = read_rights()
    assert (rights.memory, rights.up, rights.down) == (None, None, None)
    assert rights.device_names is None
    with pytest.raises(FileNotFoundError):
        read_rights(config)  # one that was named must be there


def test_every_key_is_read(config: Path) -> None:
    config.write_text(
        'name = "home"\nowner = "ann"\nplace = "oslo"\ndevices = ["cuda:0", "cuda:1"]\n'
        'memory = "10GiB"\nup = "20Mbit"\ndown = "1Gbit"\n'
        'monthly = "500GB"\nhours = "22-08"\nstay = "4h"\n'
        '[data]\nscans = "scans.npz"\n'
        '[data.notes]\npath = "/notes/*.txt"\nusers = ["ann-k3xq"]\nleaves = ["label"]\n'
    )
    (config.parent / "scans.npz").touch()
    assert peer_toml() == config
    rights = read_rights()
    assert (rights.name, rights.owner, rights.place) == ("home", "ann", "oslo")
    assert rights.device_names == ("cuda:0", "cuda:1")
    assert (rights.memory, rights.up, rights.down) == (10 * 2**30, 2.5e6, 1.25e8)
    assert (rights.monthly, rights.hours, rights.stay) == (500e9, "22-08", 4 * 3600)
    assert rights.data == {
        "scans": OwnData(path=str(config.parent / "scans.npz")),
        "notes": OwnData(path="/notes/*.txt", users=("ann-k3xq",), leaves=("label",)),
    }
    assert OwnData(path="x").leaves == ()
    config.write_text('devices = "cpu"')
    assert read_rights().device_names == ("cpu",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('nmae = "x"', "peer.toml:1: `nmae` is not a known key"),
        ("\nshare = true", "peer.toml:2: `share` is not a known key"),
        ("monthly = 500", "`monthly`"),
        ('monthly = "0GB"', "`monthly` is 0"),
        ('hours = "8 to 10"', '`hours` is "8 to 10": expected hours such as "22-08"'),
        ('hours = "8-25"', "00:00 to 24:00"),
        ('hours = "8-8"', "no time at all"),
        ('stay = "0h"', "`stay` is 0"),
        ('data = {"a/b" = "x"}', "`data.a/b` is no name"),
        ('[data]\nscans = "none.npz"', "peer.toml:2: `data.scans` .* no such file"),
        ('[data.scans]\npath = "x"\nuser = ["ann"]', r"peer.toml:3: `data.scans.user` .*users"),
        ('[data.scans]\npath = "x"\nusers = []', "nobody could use it"),
        ("up = 20", "`up`"),
        ('up = "0Mbit"', "`up` is 0"),
        ("memory = ", "not valid TOML"),
        ("devices = []", "`devices` is empty"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(config: Path, text: str, said: str) -> None:
    config.write_text(text)
    with pytest.raises(SettingsError, match=said):
        read_rights()
