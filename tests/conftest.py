"""How tests run: HYPOTHESIS_PROFILE chooses what property tests do, "automation" is the default,
"night" what `.ci/nightly` takes."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

# Workers are as many as cores, and tensors are tiny: a second thread of a worker only waits for the
# others' (before the first import of torch, which reads it).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine is no failure, and neither is an example that nobody has seen before: the same
# commit gives the same result. "long" looks for new examples instead.
settings.register_profile("automation", max_examples=50, derandomize=True, deadline=None)
settings.register_profile("night", max_examples=300, derandomize=True, deadline=None)
settings.register_profile("long", max_examples=2000, deadline=None, print_blob=True)
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "automation")
settings.load_profile(_PROFILE)
if _PROFILE in ("automation", "night") and hasattr(providers, "is_local_module_file"):
    # Hypothesis draws numbers that it finds in the source of local modules, of all that happen to
    # be imported by then: examples would follow from which tests ran before in the same worker.
    providers.is_local_module_file = lambda path: False

ON_TRUST = ("dag", "peer", "planner", "sim")
"""Rooms whose tests are about what is made of a graph."""

# A shell's background job ignores SIGINT, its children do too, and our daemons respect that: the
# processes that tests interrupt must not inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no later collection of garbage looks at them again."""
    if "shoal.dag.capture.export" in sys.modules:
        from shoal.tests.dag.capture.composites import prepare_once

        prepare_once()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_warm_planner() -> Iterator[None]:
    """Brokers of this process share what imports torch to plan: seconds for each of them else."""
    from shoal.tests.planner.service.sharing import SHARING

    with SHARING.shared():
        yield


@pytest.fixture(scope="session")
def captures() -> Any:
    """Of models that jobs of this process have in common: seconds for each of them else."""
    from shoal.tests.client.captures import Captures

    return Captures()


@pytest.fixture(scope="module")
def captures_once(captures: Any) -> Iterator[None]:
    """A model that was captured before is not captured again, whatever the job."""
    with captures.shared():
        yield


@pytest.fixture(scope="module", autouse=True)
def proved_where_it_matters(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where something is made of a graph, and neither captured nor submitted for its own sake,
    captures are not proved by day: a quarter of their time else. `.ci/nightly` has them proved."""
    room, *inner = request.path.relative_to(Path(__file__).parent).parts
    trusted = room in ON_TRUST and "capture" not in inner and "PROVE_CAPTURES" not in os.environ
    with pytest.MonkeyPatch.context() as patch:
        if trusted and (capture := sys.modules.get("shoal.dag.capture.capture")) is not None:
            from shoal.dag.capture.proof import Proved

            patch.setattr(capture, "prove", lambda *_: Proved({}))
            patch.setattr(capture, "prove_values", lambda *_: "")
        yield


@pytest.fixture(scope="session", autouse=True)
def no_cache_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hashes of weights that tests submit are not remembered in the home of who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def no_credentials_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """They are found by address: a broker may listen where one of another test did, or of the user
    who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield
