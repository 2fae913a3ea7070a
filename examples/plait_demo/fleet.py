"""Both engines together: started, asked, and waited for until they have proven a version."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from plait.errors import ReplicaUnproven
from plait.wire import ChannelDocument, ReplicaReport
from plait_client.registry import RegistryClient
from plait_demo.engines import Host
from plait_demo.rollouts import Answer, Sampler
from plait_demo.settings import POLICY

_POLL_S: Final = 0.02
_PROVEN_WITHIN_S: Final = 180.0
_PROBE_TOKENS: Final = 12


class Fleet:
    """The demo's engines, as the registry's fleet and their own answers show them."""

    def __init__(self, hosts: Sequence[Host], client: RegistryClient) -> None:
        self.hosts = hosts
        self._client = client

    @property
    def samplers(self) -> list[Sampler]:
        return [host.sampler for host in self.hosts]

    def start_engines(self) -> None:
        """All at once; returns when all of them answer."""
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            for started in [pool.submit(host.start_engine) for host in self.hosts]:
                started.result()

    def start_followers(self) -> None:
        for host in self.hosts:
            host.start_follower()

    def await_proven(self, head: ChannelDocument) -> Mapping[str, ReplicaReport]:
        """Returns when every replica reports the head's weights as proven, and every engine wears
        its stamp.

        Raises:
            ReplicaUnproven: that didn't happen; with what each replica says of itself.
        """
        deadline = time.monotonic() + _PROVEN_WITHIN_S
        stamp = f"{POLICY}@{head.seq}#{head.generation}"
        while True:
            reports = {r.replica: r.report for r in self._client.replicas(POLICY)}
            behind = [h.name for h in self.hosts if not _is_at(reports.get(h.name), head)]
            if not behind:
                behind = [host.name for host in self.hosts if host.sampler.version() != stamp]
            if not behind:
                return reports
            if time.monotonic() > deadline:
                said = {name: _in_words(reports.get(name)) for name in behind}
                raise ReplicaUnproven(f"not at {stamp} after {_PROVEN_WITHIN_S:g} s: {said}")
            time.sleep(_POLL_S)

    def probe(self, prompts: Sequence[Sequence[int]]) -> dict[str, tuple[Answer, ...]]:
        """Greedy answers of every engine to fixed prompts, by engine."""
        return {host.name: _probe(host.sampler, prompts) for host in self.hosts}


def _probe(sampler: Sampler, prompts: Sequence[Sequence[int]]) -> tuple[Answer, ...]:
    # One after the other and from an empty cache, so that each is computed in the same blocks.
    sampler.forget_prompts()
    return tuple(sampler.greedy(prompt, _PROBE_TOKENS) for prompt in prompts)


def _is_at(report: ReplicaReport | None, head: ChannelDocument) -> bool:
    return (
        report is not None
        and report.phase == "serving"
        and (report.seq, report.fingerprint) == (head.seq, head.fingerprint)
        and report.seen_generation == head.generation
    )


def _in_words(report: ReplicaReport | None) -> str:
    if report is None:
        return "never heard of"
    return f"{report.phase}, version {report.seq}, {report.error_code} {report.error}".strip()
