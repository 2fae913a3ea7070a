"""One registry for the folder, and clients of it. Every test has a policy of its own."""

import re
import signal
from collections.abc import Iterator

import pytest

from plait_client.registry import RegistryClient
from tests.trainer_agent.proxy import Proxy
from tests.trainer_agent.registry_process import RegistryProcess


@pytest.fixture(scope="session")
def shared_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryProcess]:
    registry = RegistryProcess(tmp_path_factory.mktemp("registry") / "data")
    registry.start()
    yield registry
    registry.stop()


@pytest.fixture
def client(shared_registry: RegistryProcess) -> Iterator[RegistryClient]:
    with RegistryClient(shared_registry.url) as client:
        yield client


@pytest.fixture
def proxy(shared_registry: RegistryProcess) -> Iterator[Proxy]:
    proxy = Proxy(shared_registry.port)
    yield proxy
    proxy.close()


@pytest.fixture
def far(proxy: Proxy) -> Iterator[RegistryClient]:
    """A client that reaches the registry through the proxy, and gives up at once."""
    with RegistryClient(proxy.url, attempts=1, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def mortal_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryProcess]:
    registry = RegistryProcess(tmp_path_factory.mktemp("mortal") / "data")
    yield registry
    registry.stop()


@pytest.fixture
def own_registry(mortal_registry: RegistryProcess) -> RegistryProcess:
    """A registry that the test may kill; it runs, and has no failpoint."""
    if not mortal_registry.is_whole:
        mortal_registry.stop()
        mortal_registry.start()
    return mortal_registry


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> str:
    name = f"{request.path.stem} {request.node.name}"  # tests of two files may be called alike
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:100]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts the test, although a shell may start jobs with that ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
