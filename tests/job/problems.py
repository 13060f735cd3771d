"""What a reader of `job.toml` is told of a file that says something wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.job import Job, SettingsError

HEAD = 'version = 1\n[model]\nfactory = "a:b"\n'


def problem(tmp_path: Path, body: str, head: str = HEAD) -> str:
    path = tmp_path / "job.toml"
    path.write_text(head + body)
    with pytest.raises(SettingsError) as caught:
        Job.from_toml(path)
    return str(caught.value).removeprefix(str(tmp_path) + "/")
