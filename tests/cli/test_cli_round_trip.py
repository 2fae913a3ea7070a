"""The black-box round trip: publish six checkpoints, check every one out, compare every bit."""

from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.client import checkpoints
from tests.client.checkpoints import Bits

FIELDS = {
    "policy", "seq", "parent", "kind", "channel", "generation", "fingerprint", "layout_digest",
    "version_digest", "manifest_digest", "changed_elements", "changed_bytes", "total_elements",
    "dense_bytes", "payload_bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def versions(plait: Shell, tmp_path_factory: pytest.TempPathFactory) -> list[Bits]:
    root = tmp_path_factory.mktemp("published")
    line = [checkpoints.first_bits(700)]
    line += [checkpoints.stepped(line[-1], 700)]
    for seed in range(701, 705):
        line.append(checkpoints.stepped(line[-1], seed))
    for seq, bits in enumerate(line, start=1):
        folder = checkpoints.write(root / str(seq), bits, files=1 + seq % 3)
        sent = plait.json("publish", folder, "--policy", "trip", "--message", f"step {seq}")
        assert set(sent) >= FIELDS
        assert (sent["seq"], sent["generation"], sent["channel"]) == (seq, seq, "main")
        assert sent["parent"] == (None if seq == 1 else seq - 1)
        assert sent["kind"] == ("anchor" if seq == 1 else "delta")
        assert sent["fingerprint"] == checkpoints.independent_fingerprint(bits)
        assert sent["total_elements"] == sum(array.size for array in bits.values())
        assert sent["dense_bytes"] == sum(array.nbytes for array in bits.values())
        if seq > 1:
            differing = [bits[n] != line[seq - 2][n] for n in bits]
            assert sent["changed_elements"] == sum(int(mask.sum()) for mask in differing)
    return line


def test_every_version_comes_back_into_one_folder_and_into_fresh_ones(
    plait: Shell, installed: Shell, versions: list[Bits], tmp_path: Path
) -> None:
    for seq in (4, 6, 1, 5):
        installed.run("checkout", f"trip@{seq}", tmp_path / "moving")
        assert checkpoints.read(tmp_path / "moving") == checkpoints.expected(versions[seq - 1])
    for seq in (2, 3):
        done = plait.json("checkout", f"trip@{seq}", tmp_path / str(seq))
        assert (done["seq"], done["way"]) == (seq, "built")
        assert checkpoints.read(tmp_path / str(seq)) == checkpoints.expected(versions[seq - 1])
    assert plait.json("checkout", "trip@main~1", tmp_path / "3")["seq"] == 5
    assert checkpoints.read(tmp_path / "3") == checkpoints.expected(versions[4])
    assert plait.json("verify", "trip@5", tmp_path / "3")["ok"] is True
    plait.run("verify", "trip@4", tmp_path / "3", code=3)


def test_commands_print_one_document_with_what_the_tables_show(
    plait: Shell, versions: list[Bits]
) -> None:
    shown = plait.json("show", "trip@3")
    assert set(shown) >= FIELDS
    assert shown["metadata"] == {"message": "step 3"}
    log = plait.json("log", "trip", "--limit", "2")
    assert [v["seq"] for v in log["versions"]] == [6, 5]
    plan = plait.json("plan", "trip", "--from", "6", "--to", "5")
    assert [(s["kind"], s["to_seq"]) for s in plan["steps"]] == [("reverse", 5)]
    assert plait.json("verify", "trip@2")["chunks"] == 2
    difference = plait.json("diff", "trip@5", "trip@6")
    old, new = versions[4], versions[5]
    assert {t["name"]: t["changed"] for t in difference["tensors"]} == {
        name: int((old[name] != new[name]).sum()) for name in old if (old[name] != new[name]).any()
    }
    assert plait.json("fleet", "trip") == {"replicas": []}
    doctor = plait.json("doctor")
    assert doctor["ok"]
    assert [c["check"] for c in doctor["checks"]] == ["cache", "registry", "clock", "store"]
    table = plait.run("log", "trip").stdout
    assert "step 6" in table
    assert "anchor" in table


def test_channels_are_made_moved_and_rolled_back(
    plait: Shell, versions: list[Bits], tmp_path: Path
) -> None:
    made = plait.json("channel", "create", "trip", "stable", "--to", "3")
    assert (made["channel"], made["seq"], made["generation"]) == ("stable", 3, 1)
    moved = plait.json("channel", "move", "trip", "stable", "--to", "4", "--reason", "good")
    assert (moved["seq"], moved["generation"], moved["kind"]) == (4, 2, "promote")
    back = plait.json("rollback", "trip", "--to", "2", "--reason", "bad", "--channel", "stable")
    assert (back["seq"], back["generation"], back["reason"]) == (2, 3, "bad")
    plait.run("channel", "move", "trip", "stable", "--to", "4", "--generation", "2", code=3)
    listed = plait.json("channel", "list", "trip")
    assert {c["channel"]: c["seq"] for c in listed["channels"]} == {"main": 6, "stable": 2}
    plait.run("checkout", "trip@stable", tmp_path / "out")
    assert checkpoints.read(tmp_path / "out") == checkpoints.expected(versions[1])


def test_an_external_line_from_publish_to_checkout(plait: Shell, tmp_path: Path) -> None:
    first = checkpoints.first_bits(710)
    second = checkpoints.stepped(first, 711)
    base = checkpoints.write(tmp_path / "base", first)
    assert plait.json("publish", base, "--policy", "ext", "--external")["external"] is True
    folder = checkpoints.write(tmp_path / "2", second)
    assert plait.json("publish", folder, "--policy", "ext")["kind"] == "delta"
    out = tmp_path / "out"
    plait.run("checkout", "ext", out, code=3)
    plait.run("checkout", "ext", out, "--base", folder)
    assert checkpoints.read(out) == checkpoints.expected(second)
    plait.run("checkout", "ext@1", out)
    assert checkpoints.read(out) == checkpoints.expected(first)
