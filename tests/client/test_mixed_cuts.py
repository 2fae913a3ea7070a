"""Chains whose deltas are cut differently, and what differs between two versions."""

import secrets
from pathlib import Path

import numpy as np
import pytest

from plait.codec.algebra import detect
from plait.codec.frames import encode_delta
from plait.cut import Cut, FrameSpec, Segment, plain_cut
from plait.errors import LayoutChanged
from plait.fingerprint import Fingerprint
from plait.manifest import Manifest, Statistics
from plait.version_record import VersionRecord
from plait.weights import fingerprint_weights
from plait_client import steps
from plait_client.checkout import checkout
from plait_client.checkpoint import CheckpointFolder
from plait_client.compare import compare_versions
from plait_client.fetch import Fetcher
from plait_client.progress import SILENT
from plait_client.publish import Request, publish
from plait_client.registry import RegistryClient
from plait_client.upload import commit_version, put_cut, upload_frames
from tests.client import checkpoints
from tests.client.checkpoint_line import Line, make_line


def halved(cut: Cut) -> Cut:
    """Each frame of one segment as two."""
    frames: list[FrameSpec] = []
    for frame in cut.frames:
        (segment, *rest), half = frame.segments, frame.segments[0].run // 2
        if rest or not half:
            frames.append(frame)
            continue
        middle = segment.first_word + half * max(frame.item_bytes // 2, 1)
        frames.append(FrameSpec(frame.item_bytes, (Segment(segment.first_word, half, 0, 1),)))
        frames.append(FrameSpec(frame.item_bytes, (Segment(middle, segment.run - half, 0, 1),)))
    return Cut(cut.layout_digest, tuple(frames))


def publish_with(client: RegistryClient, cut: Cut, line: Line, seq: int) -> None:
    """What a trainer does: frames of its own cut, committed on the head."""
    old, new = (CheckpointFolder(line.folder(number)) for number in (seq - 1, seq))
    head = client.channel(line.policy, "main")
    deltas = [detect(frame, old, new) for frame in cut.frames]
    frames = [encode_delta(n, cut.frames[n], d) for n, d in enumerate(deltas) if d.count]
    chunks = tuple(upload_frames(client, frames))
    put_cut(client, cut)
    target, layout = fingerprint_weights(new), new.layout
    changed = sum(delta.count for delta in deltas)
    manifest = Manifest(
        kind="delta", layout=layout.digest, cut=cut.digest, target=target, chunks=chunks,
        base=Fingerprint.parse(head.fingerprint),
        statistics=Statistics(
            changed, changed, layout.total_elements, layout.dense_bytes, sum(c.size for c in chunks)
        ),
    )  # fmt: skip
    record = VersionRecord(
        line.policy, layout.digest, head.version_digest, target, "full", secrets.token_hex(16)
    )
    commit_version(
        client, policy=line.policy, channel="main", record=record, manifest=manifest,
        expected_head=head.version_digest, expected_generation=head.generation,
    )  # fmt: skip


@pytest.fixture
def line(client: RegistryClient, fetcher: Fetcher, policy: str, tmp_path: Path) -> Line:
    """Versions 1 and 2, 5 by the plain cut, 3 and 4 by another one."""
    line = make_line(fetcher, policy, tmp_path / "in", 2, seed=300)
    cut = halved(plain_cut(CheckpointFolder(line.folder(1)).layout, for_anchor=False))
    for seq in (3, 4):
        line.versions.append(checkpoints.stepped(line.versions[-1], seq))
        checkpoints.write(line.folder(seq), line.versions[-1])
        publish_with(client, cut, line, seq)
    line.versions.append(checkpoints.stepped(line.versions[-1], 5))
    checkpoints.write(line.folder(5), line.versions[-1])
    assert publish(Request(line.folder(5), policy), fetcher).parent == 4
    return line


def test_a_checkout_moves_across_cuts_in_both_directions(
    client: RegistryClient, fetcher: Fetcher, line: Line, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    checkout(client, line.ref(2), out, base=line.folder(2), fetcher=fetcher)
    for seq in (5, 2, 4, 3, 5, 4):
        result = checkout(client, line.ref(seq), out, fetcher=fetcher)
        assert result.version.seq == seq
        assert checkpoints.read(out) == checkpoints.expected(line.versions[seq - 1])
    fresh = tmp_path / "fresh"
    checkout(client, line.ref(5), fresh, fetcher=fetcher)
    assert checkpoints.read(fresh) == checkpoints.expected(line.versions[4])


def test_a_chain_that_is_too_long_to_add_up_at_once_is_moved_in_legs(
    client: RegistryClient, fetcher: Fetcher, line: Line, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(steps, "_STEPS_MAX", 1)
    out = tmp_path / "out"
    checkout(client, line.ref(2), out, base=line.folder(2), fetcher=fetcher)
    for seq in (4, 2, 5):
        assert checkout(client, line.ref(seq), out, fetcher=fetcher).way == "moved"
        assert checkpoints.read(out) == checkpoints.expected(line.versions[seq - 1])


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 5), (5, 1), (3, 3)])
def test_a_comparison_counts_what_really_differs(
    client: RegistryClient, fetcher: Fetcher, line: Line, first: int, second: int
) -> None:
    changes = compare_versions(
        fetcher, client.version(line.policy, str(first)), client.version(line.policy, str(second)),
        SILENT,
    )  # fmt: skip
    old, new = line.versions[first - 1], line.versions[second - 1]
    counted = {name: int(np.count_nonzero(old[name] != new[name])) for name in old}
    assert {c.name: c.changed for c in changes} == {n: k for n, k in counted.items() if k}


def test_a_comparison_across_an_anchor_reads_both_versions(
    client: RegistryClient, fetcher: Fetcher, line: Line
) -> None:
    bits = checkpoints.first_bits(301)
    checkpoints.write(line.folder(6), bits)
    publish(Request(line.folder(6), line.policy, mode="anchor"), fetcher)
    changes = compare_versions(
        fetcher, client.version(line.policy, "1"), client.version(line.policy, "6"), SILENT
    )
    old = line.versions[0]
    assert sum(c.changed for c in changes) == sum(
        int(np.count_nonzero(old[name] != bits[name])) for name in bits
    )


def test_versions_of_other_layouts_do_not_compare(
    client: RegistryClient, fetcher: Fetcher, line: Line
) -> None:
    bits = {n: a for n, a in checkpoints.first_bits(302).items() if n != "model.half"}
    folder = checkpoints.write(line.folder(6), bits)
    publish(Request(folder, line.policy, mode="anchor"), fetcher)
    with pytest.raises(LayoutChanged, match=r"model\.half"):
        compare_versions(
            fetcher, client.version(line.policy, "1"), client.version(line.policy, "6"), SILENT
        )
