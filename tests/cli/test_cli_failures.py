"""What the command line does when something is wrong: exit code, words, and nothing written."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.client import checkpoints
from tests.client.serving import PLAIT, ServedRegistry


def test_wrong_usage_is_two(plait: Shell, tmp_path: Path) -> None:
    plait.run("publish", code=2)
    plait.run("nonsense", code=2)
    plait.run("show", "trip@", code=2)
    folder = checkpoints.write(tmp_path / "a", checkpoints.first_bits(800))
    plait.run("publish", folder, "--policy", "p", "--external", "--new-anchor", code=2)
    plait.run("log", "p", code=2, PLAIT_URL="not an address")


@pytest.mark.parametrize(
    "words",
    [
        ("publish", "--policy", "p"),
        ("publish", "nowhere", "--policy", "a b"),
        ("publish", "nowhere", "--policy", "p", "--channel", "7"),
        ("checkout", "../p", "out"),
        ("log", "a/b"),
        ("log", "p", "--before", "0"),
        ("fleet", ".."),
        ("plan", "p@3", "--to", "1"),
        ("channel", "list", "p@main"),
        ("channel", "create", "p", "x y", "--to", "1"),
        ("channel", "create", "p", "x", "--to", ""),
        ("rollback", "p", "--to", "1"),
        ("follow", "p", "--dir", "out", "--once", "--name", "a b"),
        ("log", "p", "--limit", "many"),
        ("nonsense",),
        ("completion", "tcsh"),
    ],
)
def test_wrong_usage_with_json_is_one_problem_document(
    plait: Shell, words: tuple[str, ...]
) -> None:
    said = plait.run(*words, "--json", code=2)
    assert said.stdout == ""
    assert json.loads(said.stderr)["code"] == "usage"
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "variables",
    [
        {"PLAIT_TOKEN": "secret\n"},
        {"PLAIT_CACHE_BYTES": "64G"},
        {"PLAIT_URL": "ftp://x"},
        {"ALL_PROXY": "ftp://127.0.0.1:1"},
        {"SSL_CERT_FILE": "/nowhere/ca.pem"},
    ],
)
def test_a_wrong_setting_is_named_and_a_secret_is_not_shown(
    plait: Shell, tmp_path: Path, variables: dict[str, str]
) -> None:
    said = plait.run("checkout", "p", tmp_path / "out", code=2, **variables)
    assert "secret" not in said.stderr
    assert "Traceback" not in said.stderr
    assert said.stderr.startswith("error: ")


def test_a_name_that_is_no_text_is_printed_all_the_same(plait: Shell, tmp_path: Path) -> None:
    bits = checkpoints.first_bits(807)
    plait.run("publish", checkpoints.write(tmp_path / "1", bits), "--policy", "bytes")
    out = tmp_path / os.fsdecode(b"out-\xff")
    assert plait.json("checkout", "bytes", out)["directory"] == str(out)
    assert "out-" in plait.run("checkout", "bytes", out).stdout
    refused = plait.run("verify", "bytes", tmp_path / os.fsdecode(b"no-\xff"), "--json", code=1)
    assert json.loads(refused.stderr)["code"] == "checkpoint_invalid"


def test_an_answer_that_can_not_be_printed_is_an_error(plait: Shell, tmp_path: Path) -> None:
    bits = checkpoints.first_bits(808)
    plait.run("publish", checkpoints.write(tmp_path / "1", bits), "--policy", "full")
    for more in ((), ("--json",)):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [PLAIT, "log", "full", *more], env=os.environ | plait.environment, stdout=full,
                stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
        assert done.returncode == 1
        assert "standard output" in done.stderr
        assert "Traceback" not in done.stderr


def test_errors_name_the_thing_and_the_remedy_and_json_mode_keeps_them_off_standard_output(
    plait: Shell, tmp_path: Path
) -> None:
    said = plait.run("show", "nobody@1", code=1)
    assert said.stdout == ""
    assert said.stderr.startswith("error: ")
    assert "nobody" in said.stderr
    problem = plait.run("show", "nobody@1", "--json", code=1)
    assert problem.stdout == ""
    assert json.loads(problem.stderr)["code"] == "not_found"


def test_a_checkpoint_with_a_name_twice_is_one_and_publishes_nothing(
    plait: Shell, tmp_path: Path
) -> None:
    folder = checkpoints.write(tmp_path / "a", checkpoints.first_bits(801))
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    said = plait.run("publish", folder, "--policy", "twice", code=1)
    assert "is both in copy.safetensors and in model.safetensors" in said.stderr
    plait.run("log", "twice", code=1)


def test_a_changed_layout_is_three_and_names_the_way_out(plait: Shell, tmp_path: Path) -> None:
    bits = checkpoints.first_bits(802)
    plait.run("publish", checkpoints.write(tmp_path / "1", bits), "--policy", "changed")
    del bits["model.half"]
    said = plait.run(
        "publish", checkpoints.write(tmp_path / "2", bits), "--policy", "changed", code=3
    )
    assert "'model.half' is missing" in said.stderr
    assert "--new-anchor" in said.stderr
    sent = plait.json("publish", tmp_path / "2", "--policy", "changed", "--new-anchor")
    assert (sent["seq"], sent["kind"]) == (2, "anchor")


def test_a_wrong_base_is_three_and_moves_nothing(plait: Shell, tmp_path: Path) -> None:
    bits = checkpoints.first_bits(803)
    plait.run("publish", checkpoints.write(tmp_path / "1", bits), "--policy", "based")
    other = checkpoints.write(tmp_path / "other", checkpoints.stepped(bits, 1))
    folder = checkpoints.write(tmp_path / "2", checkpoints.stepped(bits, 2))
    plait.run("publish", folder, "--policy", "based", "--base", other, code=3)
    assert plait.json("show", "based@main")["seq"] == 1
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "mine.txt").write_text("mine")
    plait.run("checkout", "based", foreign, code=2)
    assert [path.name for path in foreign.iterdir()] == ["mine.txt"]


def test_a_registry_that_is_away_is_four_and_the_same_command_works_later(
    plait: Shell, registry: ServedRegistry, tmp_path: Path
) -> None:
    bits = checkpoints.first_bits(804)
    first = checkpoints.write(tmp_path / "1", bits)
    second = checkpoints.write(tmp_path / "2", checkpoints.stepped(bits, 3))
    plait.run("publish", first, "--policy", "away")
    registry.stop()
    try:
        plait.run("publish", second, "--policy", "away", code=4)
        plait.run("checkout", "away", tmp_path / "out", code=4)
        assert not (tmp_path / "out").exists()
        assert plait.run("doctor", code=4).stdout.count("FAILED") == 1
    finally:
        registry.start()
    assert plait.json("publish", second, "--policy", "away")["seq"] == 2
    plait.run("checkout", "away", tmp_path / "out")
    assert checkpoints.read(tmp_path / "out") == checkpoints.read(second)


@pytest.mark.parametrize(("point", "seq"), [("publish.uploaded", 2), ("publish.committed", 2)])
def test_a_publish_killed_before_or_after_its_commit_is_published_once(
    plait: Shell, tmp_path: Path, point: str, seq: int
) -> None:
    policy = point.replace(".", "-")
    bits = checkpoints.first_bits(805)
    plait.run("publish", checkpoints.write(tmp_path / "1", bits), "--policy", policy)
    folder = checkpoints.write(tmp_path / "2", checkpoints.stepped(bits, 4))
    plait.run("publish", folder, "--policy", policy, code=-9, PLAIT_FAILPOINT=point)
    if point == "publish.uploaded":
        assert plait.json("show", f"{policy}@main")["seq"] == 1
        assert plait.json("publish", folder, "--policy", policy)["seq"] == seq
    else:
        assert plait.json("show", f"{policy}@main")["seq"] == seq
        assert plait.json("publish", folder, "--policy", policy)["seq"] == seq
    plait.run("checkout", policy, tmp_path / "out")
    assert checkpoints.read(tmp_path / "out") == checkpoints.read(folder)


@pytest.mark.parametrize("more", ["--json | true", "| true", ">&-", "--json >&- 2>&-"])
def test_a_reader_that_has_enough_is_no_error(plait: Shell, tmp_path: Path, more: str) -> None:
    bits = checkpoints.first_bits(806)
    plait.run("publish", checkpoints.write(tmp_path / "1", bits), "--policy", "piped")
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {PLAIT} log piped {more}"],
        env=os.environ | plait.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (result.stdout, result.stderr) == ("", "")
