"""The whole way on PostgreSQL and a bucket: two registries, agents that reach the bucket."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plait.store import Store, open_store
from plait_client.registry import RegistryClient
from plait_trainer import Publisher
from tests.client import checkpoints
from tests.client.commands import Command
from tests.server.postgres import postgres_server
from tests.server.processes import RegistryProcess, registry_process
from tests.store.s3_server import make_bucket, options_for, s3_server
from tests.trainer_agent.reading import assert_bits_equal, weights_at
from tests.trainer_agent.tiny_models import Run

pytestmark = [pytest.mark.postgres, pytest.mark.s3]


@dataclass(frozen=True)
class Site:
    """Two registries over one database and one bucket.

    Attributes:
        options: that lead to the bucket; the agents have them as well.
    """

    here: RegistryProcess
    there: RegistryProcess
    store: Store
    options: str

    def plait(self, registry: RegistryProcess, cache: Path, *arguments: object) -> dict[str, Any]:
        """One command that must succeed; its document."""
        result = Command(
            [*map(str, arguments), "--json"], self.environment(registry, cache)
        ).result()
        assert result.code == 0, result.stderr
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    def refused(self, registry: RegistryProcess, cache: Path, *arguments: object) -> int:
        """One command that must fail; its exit code."""
        code = Command([*map(str, arguments)], self.environment(registry, cache)).result().code
        assert code != 0
        return code

    def environment(self, registry: RegistryProcess, cache: Path) -> Mapping[str, str]:
        return {
            "PLAIT_URL": registry.url,
            "PLAIT_CACHE": str(cache),
            "PLAIT_STORE_OPTIONS": self.options,
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with postgres_server() as postgres, s3_server() as port:
        database = postgres.new_database()
        bucket = f"s3://{make_bucket(port)}/weights"
        options = options_for(port)
        settings = {
            "PLAIT_STORE": bucket,
            "PLAIT_STORE_OPTIONS": json.dumps(options),
            "PLAIT_DIRECT_STORE": bucket,
        }
        with (
            registry_process(folder, database, settings=settings) as here,
            registry_process(folder, database, settings=settings) as there,
        ):
            yield Site(here, there, open_store(bucket, options), json.dumps(options))


def passed_through(registry: RegistryProcess, direction: str) -> float:
    """Bytes of chunks that went through a registry."""
    name = f'plait_chunk_bytes_total{{direction="{direction}"}} '
    rows = registry.http.get("/metrics").text.splitlines()
    return sum(float(row.removeprefix(name)) for row in rows if row.startswith(name))


def test_what_one_registry_takes_in_the_other_hands_out_bit_for_bit(
    site: Site, tmp_path: Path
) -> None:
    first = checkpoints.first_bits(1)
    second = checkpoints.stepped(first, 2)
    for number, bits in enumerate((first, second), 1):
        checkpoints.write(tmp_path / str(number), bits)
        published = site.plait(
            site.here, tmp_path / "a", "publish", tmp_path / str(number), "--policy", "p"
        )
        assert published["fingerprint"] == checkpoints.independent_fingerprint(bits)
        assert published["seq"] == number
    files = (tmp_path / "1").rglob("*")
    side_files = sum(f.stat().st_size for f in files if f.is_file() and f.suffix != ".safetensors")
    assert passed_through(site.here, "in") <= side_files  # chunks were written to the bucket
    out = tmp_path / "out"
    for ref, bits in ((1, first), (2, second), (1, first), ("main", second)):
        site.plait(site.there, tmp_path / "b", "checkout", f"p@{ref}", out)
        assert checkpoints.read(out) == checkpoints.expected(bits)
    assert passed_through(site.there, "out") == 0  # all of it came from the bucket
    site.plait(site.there, tmp_path / "b", "verify", "p")
    assert passed_through(site.there, "out") > 0


def test_a_wrong_object_in_the_bucket_is_refused_and_mended_by_the_next_publish(
    site: Site, tmp_path: Path
) -> None:
    versions = [checkpoints.first_bits(3)]
    versions.append(checkpoints.stepped(versions[0], 4))
    publisher, empty, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    folders = [tmp_path / "1", tmp_path / "2"]
    for folder, bits in zip(folders, versions, strict=True):
        checkpoints.write(folder, bits)
        site.plait(site.here, publisher, "publish", folder, "--policy", "damaged")
    site.plait(site.there, empty, "checkout", "damaged@1", out)
    with RegistryClient(site.there.url) as client:
        manifest = client.manifest(client.version("damaged", "2").manifest_digest)
    name = manifest.chunks[0].digest.removeprefix("sha256:")
    (found,) = site.store.list(f"sha256/{name[:2]}/{name}")
    site.store.put(found.key, bytes(found.size))

    assert site.refused(site.there, empty, "checkout", "damaged@2", out) == 3
    assert checkpoints.read(out) == checkpoints.expected(versions[0])
    assert site.refused(site.there, empty, "verify", "damaged@2") == 3

    # The same change again makes the same chunk. The other registry knows that it has to be sent.
    for folder in folders:
        site.plait(site.here, publisher, "publish", folder, "--policy", "damaged")
    site.plait(site.there, empty, "verify", "damaged@2")
    site.plait(site.there, empty, "checkout", "damaged@2", out)
    assert checkpoints.read(out) == checkpoints.expected(versions[1])


def test_a_trainer_that_reaches_the_bucket_sends_no_chunk_through_a_registry(
    site: Site, tmp_path: Path
) -> None:
    before = passed_through(site.here, "in")
    run = Run()
    states = [run.expected()]
    with (
        RegistryClient(site.here.url) as client,
        Publisher(
            run.model, run.optimizer, client=client, policy="trained", store=site.store
        ) as publisher,
    ):
        publisher.publish().result(60)
        for _ in range(2):
            run.step()
            states.append(run.expected())
            publisher.publish().result(60)
    assert passed_through(site.here, "in") == before
    with RegistryClient(site.there.url) as client:
        for seq, expected in enumerate(states, 1):
            assert_bits_equal(weights_at(client, "trained", seq), expected)
    found = site.plait(site.there, tmp_path / "b", "checkout", "trained", tmp_path / "out")
    assert found["seq"] == len(states)
