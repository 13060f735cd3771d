"""Models on a Hub, by Hugging Face's own library: "hf://ORG/NAME" or "hf://ORG/NAME@REVISION" of
`model.factory`, and "hf://ORG/NAME" of `output.push`. HF_ENDPOINT, HF_TOKEN and its cache count as
they do elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...job import Job, SettingsError
from ..errors import ClientError

__all__ = ["PushError", "can_push", "fetched", "push"]

HUB = "hf://"
_NAME = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.A)
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""What is fetched; where no weights are among it, *.bin as well."""
_TRIES = "HF_ENDPOINT names another Hub; a folder on this disk is hf:DIR"


class PushError(ClientError):
    """Weights that are here and could not be pushed."""


def fetched(job: Job, say: Callable[[str], None]) -> Job:
    """Return the job with the folder on this disk in place of a Hub's name in `model.factory`: so
    it says for good which revision it is. Raises SettingsError in one line, whatever went wrong."""
    name = job.model.factory
    if not name.startswith(HUB) or job.module is not None:
        return job
    key = "model.factory"
    repo, revision = _parsed(name, key)
    library = _library(name, key)
    say(f"fetching {repo}" + (f" at {revision}" if revision else ""))
    with _told(name, key, library):
        folder = Path(
            library.HfApi().snapshot_download(repo, revision=revision, allow_patterns=_FILES)
        )
        if not any(folder.glob("*.safetensors")):
            library.HfApi().snapshot_download(repo, revision=revision, allow_patterns=["*.bin"])
    return replace(job, model=replace(job.model, factory=f"hf:{folder}"))


def can_push(job: Job) -> None:
    """Ask the Hub whether the token here may write, where the job wants to push. Raises
    SettingsError without one, and whatever else would stop it."""
    name, key = job.output.push, "output.push"
    if not name:
        return
    repo = _repo_to_push(name)
    library = _library(name, key)
    with _told(name, key, library):
        library.utils.validate_repo_id(repo)
    if not library.get_token():
        raise SettingsError(
            key,
            f'is "{name}", and there is no token to write with: expected `hf auth login` once, or '
            "HF_TOKEN",
        )
    with _told(name, key, library):
        found = library.HfApi().whoami()
    owner = repo.partition("/")[0]
    owners = [found["name"], *(org["name"] for org in found.get("orgs", ()))]
    if found.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise SettingsError(key, f'is "{name}", and the token here may read only: expected another')
    if owner not in owners:
        raise SettingsError(
            key, f'is "{name}", and the token here writes for {" and ".join(owners)}, not {owner}'
        )


def push(name: str, written: list[Path], message: str) -> str:
    """Write files and what is in folders to the Hub, as one commit; the repository is made where it
    is not there. Returns its URL. Raises PushError."""
    repo = _repo_to_push(name)
    try:
        library = _library(name, "output.push")
        with _told(name, "output.push", library):
            hub = library.HfApi()
            url = hub.create_repo(repo, exist_ok=True)
            parts = [
                library.CommitOperationAdd(inside, str(file))
                for path in written
                for inside, file in _inside(path)
            ]
            hub.create_commit(repo, parts, commit_message=message)
    except (SettingsError, OSError) as error:
        files = ", ".join(map(str, written))
        raise PushError(f"{files} is written, and not pushed: {error}") from None
    return str(url)


def _inside(path: Path) -> list[tuple[str, Path]]:
    """Names in a repository, and the files: of a folder what is in it."""
    if not path.is_dir():
        return [(path.name, path)]
    files = sorted(one for one in path.rglob("*") if one.is_file())
    return [(one.relative_to(path).as_posix(), one) for one in files]


def _repo_to_push(name: str) -> str:
    repo, revision = _parsed(name, "output.push")
    if revision:
        raise SettingsError("output.push", f'is "{name}": expected no @REVISION to write to')
    return repo


def _parsed(name: str, key: str) -> tuple[str, str | None]:
    found = _NAME.fullmatch(name)
    if found is None:
        raise SettingsError(key, f'is "{name}": expected hf://ORG/NAME')
    return found[1], found[2]


def _library(name: str, key: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants  # its own lazy loading knows none of these
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise SettingsError(
            key, f'is "{name}", which needs huggingface_hub: pip install "shoal[hf]"'
        ) from None
    return huggingface_hub


@contextmanager
def _told(name: str, key: str, library: Any) -> Iterator[None]:
    """What the library raises, as one line."""
    errors, at = library.errors, library.constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        why = f"{at} gives it to those only who have agreed to its terms there, with HF_TOKEN"
    except errors.RepositoryNotFoundError:
        why = f"{at} has none of that name, or none for you: some want a token (HF_TOKEN)"
    except errors.RevisionNotFoundError:
        why = f"{at} has it, and no such revision"
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        token = ": is the token (HF_TOKEN) right?" if status in (401, 403) else ""
        why = f"{at} answers {status}{token}"
    except errors.LocalEntryNotFoundError:
        why = f"{at} does not answer, and it was not fetched before; {_TRIES}"
    except library.utils.HFValidationError as error:
        why = str(error).split("\n")[0]
    except Exception as error:  # its HTTP library's, which differs by version
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise
        why = f"{at} does not answer ({type(error).__name__}); {_TRIES}"
    else:
        return
    raise SettingsError(key, f'is "{name}": {why}') from None
