"""An install that is no clone: the wheel with its constraints file, and the container files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from shoal.tests.test_docs import tracked

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONTAINERS = sorted(ROOT.glob("docs/deploy/Dockerfile.*"))
INSTRUCTIONS = {
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "RUN",
    "USER",
    "VOLUME",
}
INSTRUCTIONS |= {"WORKDIR"}


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions of a container file: comments are left out, continued lines are joined."""
    lines = [x for x in file.read_text(encoding="utf-8").splitlines() if not x.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in found]


def of(file: Path, word: str) -> list[str]:
    return [rest for each, rest in instructions(file) if each == word]


def test_container_files_are_there() -> None:
    assert [file.name for file in CONTAINERS] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("file", CONTAINERS, ids=lambda p: p.name)
def test_a_container_file_reads_as_one(file: Path) -> None:
    found = instructions(file)
    assert {word for word, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "FROM"
    assert all(rest for _, rest in found)
    image = re.fullmatch(r"python:(\d+)\.(\d+)-slim", found[0][1])
    least = re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["requires-python"])
    assert image
    assert least
    assert tuple(map(int, image.groups())) >= tuple(map(int, least.groups()))
    assert [json.loads(rest) for rest in of(file, "ENTRYPOINT")] == [["shoal"]]
    for rest in of(file, "COPY"):
        *sources, target = rest.split()
        assert target == "/src"
        assert all((ROOT / source).exists() for source in sources)
    installs = [rest for rest in of(file, "RUN") if "pip install" in rest]
    assert installs
    for command in installs:
        extras = re.findall(r"/src\[([\w,]+)\]", command)
        assert set(",".join(extras).split(",")) <= set(PROJECT["optional-dependencies"])
        for path in re.findall(r"/src/(\S+)", command):
            assert (ROOT / path).is_file()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", CONTAINERS, ids=lambda p: p.name)
def test_a_container_is_built_and_runs(file: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode:
        pytest.skip("no builder of containers is here, or it does not run")
    built = ["docker", "build", "-q", "-f", str(file), str(ROOT)]
    image = subprocess.run(built, check=True, capture_output=True, text=True).stdout.strip()
    said = subprocess.run(["docker", "run", "--rm", image, "--version"], capture_output=True)
    assert said.stdout.startswith(b"shoal ")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy of what is tracked."""
    pytest.importorskip("setuptools")
    source = tmp_path_factory.mktemp("source") / "x"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("dist")
    how = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *how, str(source)], check=True)
    (found,) = target.glob("shoal-*.whl")
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_with_its_constraints_begins_and_plays_a_project(
    wheel: Path, tmp_path: Path
) -> None:
    """In an environment that has the libraries of this one, and no shoal of it."""
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.lower().startswith(("shoal", "__editable__")):
            (borrowed / path.name).symlink_to(path)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    programs = tmp_path / "venv" / "bin"
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text(f"{borrowed}\n")

    def call(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env={"HOME": str(tmp_path), "PATH": str(programs)},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = str(programs / "pip")
    call(pip, "uninstall", "-q", "-y", "setuptools")  # an older one than the borrowed
    constraints = ["-c", str(ROOT / "constraints.txt")]
    call(pip, "install", "-q", "--no-index", f"{wheel}[hf]", *constraints)
    said = call("shoal", "--version")
    assert re.match(rf"shoal {PROJECT['version']} \(torch [\d.+a-z]+, Python 3", said)
    where = call("python", "-c", "import shoal; print(shoal.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    assert len(call("shoal", "init", "--list").splitlines()) == 5
    call("shoal", "init", "mine", "--template", "federated")
    call("shoal", "sim", "mine/scenario.toml", "--steps", "2", "--json", "end.json")
    assert json.loads((tmp_path / "end.json").read_text())["exit"] == 0
