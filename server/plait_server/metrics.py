"""What /metrics shows. One set per application, so that several can live in a process."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """Counters and gauges, by the names that dashboards use."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        self.commits = Counter(
            "plait_commits", "Commits by result (committed, replayed or an error's code)",
            ["result"], registry=self.collectors,
        )  # fmt: skip
        self.commit_seconds = Histogram(
            "plait_commit_seconds", "Time of one commit, checks included", registry=self.collectors
        )
        self.head_generation = Gauge(
            "plait_head_generation", "Generation of a channel", ["policy", "channel"],
            registry=self.collectors,
        )  # fmt: skip
        self.watchers = Gauge(
            "plait_watchers", "Long-polls and event streams that wait", registry=self.collectors
        )
        self.chunk_bytes = Counter(
            "plait_chunk_bytes", "Bytes of chunks that went through the registry",
            ["direction"], registry=self.collectors,
        )  # fmt: skip
        self.chunks = Counter(
            "plait_chunks", "Uploads by result (new, kept, mended)", ["result"],
            registry=self.collectors,
        )  # fmt: skip
        self.plan_bytes = Histogram(
            "plait_plan_bytes", "Bytes that a plan asks to fetch",
            buckets=[0, *(float(4**power) for power in range(5, 20))], registry=self.collectors,
        )  # fmt: skip
        self.requests = Counter(
            "plait_requests", "Answers by status", ["status"], registry=self.collectors
        )
