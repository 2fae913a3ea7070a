"""The compose file and the Dockerfiles, as far as they are checked without a container engine."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from sqlalchemy import make_url

from plait.store import FsspecStore, open_store
from plait_server.settings import Settings

from .dockerfile import Dockerfile

ROOT = Path(__file__).parents[2]
DOCKERFILES = ["server/Dockerfile", "trainer_agent/Dockerfile", "rollout_agent/Dockerfile"]

_WORDS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_DURATION = {"type": "string", "pattern": "^[0-9]+[sm]$"}

# What this file uses of the compose specification, and what plait asks of every service beyond it.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name", "services", "volumes"],
    "additionalProperties": False,
    "patternProperties": {"^x-": {}},
    "properties": {
        "name": {"const": "plait"},
        "volumes": {"additionalProperties": {"type": "null"}},
        "services": {"additionalProperties": {"$ref": "#/definitions/service"}},
    },
    "definitions": {
        "service": {
            "type": "object",
            "required": ["image", "restart"],
            "additionalProperties": False,
            "properties": {
                "image": {"type": "string", "pattern": "^[a-z0-9./-]+(:[A-Za-z0-9.-]+)?$"},
                "build": {
                    "type": "object",
                    "required": ["context", "dockerfile"],
                    "additionalProperties": False,
                    "properties": {"context": {"const": "."}, "dockerfile": {"enum": DOCKERFILES}},
                },
                "command": _WORDS,
                "entrypoint": _WORDS,
                "environment": {
                    "type": "object",
                    "propertyNames": {"pattern": "^[A-Z][A-Za-z0-9_]*$"},
                    "additionalProperties": {"type": "string"},
                },
                "ports": {"type": "array", "items": {"type": "string"}},
                "volumes": {"type": "array", "items": {"type": "string", "pattern": "^.+:/.+$"}},
                "depends_on": {
                    "type": "object",
                    "additionalProperties": {
                        "type": "object",
                        "required": ["condition"],
                        "additionalProperties": False,
                        "properties": {
                            "condition": {
                                "enum": ["service_healthy", "service_completed_successfully"]
                            }
                        },
                    },
                },
                "healthcheck": {
                    "type": "object",
                    "required": ["test", "interval", "timeout", "start_period", "retries"],
                    "additionalProperties": False,
                    "properties": {
                        "test": {**_WORDS, "prefixItems": [{"const": "CMD"}], "minItems": 2},
                        "interval": _DURATION,
                        "timeout": _DURATION,
                        "start_period": _DURATION,
                        "retries": {"type": "integer", "minimum": 1},
                    },
                },
                "profiles": _WORDS,
                "restart": {"enum": ["no", "unless-stopped"]},
                "init": {"const": True},
                "cap_drop": {"const": ["ALL"]},
                "security_opt": {"const": ["no-new-privileges:true"]},
                "stop_signal": {"type": "string", "pattern": "^SIG[A-Z]+$"},
                "stop_grace_period": _DURATION,
            },
        }
    },
}

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Z_]+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")


def interpolated(value: Any) -> Any:
    """With defaults in place of variables, and `given` for those that must be set."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda m: m["rest"] if m["kind"] == "-" else "given", value)
    if isinstance(value, list):
        return [interpolated(each) for each in value]
    if isinstance(value, dict):
        return {key: interpolated(each) for key, each in value.items()}
    return value


def as_written() -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(document, dict)
    return document


COMPOSE: dict[str, Any] = interpolated(as_written())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_the_compose_file_fits_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(COMPOSE)


def test_the_services_that_the_documentation_names_are_there() -> None:
    assert set(SERVICES) == {"registry", "database", "objects", "bucket", "trainer", "rollout"}
    assert SERVICES["database"]["image"] == "postgres:15"


def test_named_volumes_are_declared_and_used() -> None:
    mounts = [
        mount.split(":")[0] for each in SERVICES.values() for mount in each.get("volumes", [])
    ]
    named = {source for source in mounts if not source.startswith((".", "/"))}
    assert named == set(COMPOSE["volumes"])


def test_what_a_service_waits_for_can_come_true() -> None:
    for name, service in SERVICES.items():
        for other, wait in service.get("depends_on", {}).items():
            if wait["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], (name, other)
            else:
                assert SERVICES[other]["restart"] == "no", (name, other)


def test_services_that_answer_requests_have_a_health_check() -> None:
    for name in ("registry", "database", "objects"):
        assert "healthcheck" in SERVICES[name], name


def test_the_demo_alone_is_behind_a_profile() -> None:
    behind = {name for name, service in SERVICES.items() if "profiles" in service}
    assert behind == {"trainer", "rollout"}


def test_no_secret_is_written_down_and_none_has_a_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    secret = re.compile(r"(TOKEN|PASSWORD|SECRET)$")
    for match in _VARIABLE.finditer(text):
        assert (match["kind"] == "?") == bool(secret.search(match["name"])), match[0]
    for service in as_written()["services"].values():
        for name, value in service.get("environment", {}).items():
            if secret.search(name):
                assert _VARIABLE.search(value), name


def test_ports_are_published_on_this_machine_alone() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:8400:8400"]


def test_the_registrys_store_and_database_open_with_what_it_is_given() -> None:
    environment = SERVICES["registry"]["environment"]
    store = open_store(environment["PLAIT_STORE"], json.loads(environment["PLAIT_STORE_OPTIONS"]))
    assert isinstance(store, FsspecStore)
    url = make_url(environment["PLAIT_DATABASE_URL"])
    assert (url.drivername, url.host, url.database) == ("postgresql+psycopg", "database", "plait")
    assert json.loads(environment["PLAIT_STORE_OPTIONS"])["endpoint_url"] == "http://objects:9000"


def test_the_registry_knows_every_setting_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = SERVICES["registry"]["environment"]
    image = Dockerfile.read(ROOT / "server/Dockerfile").last_stage()
    in_image = re.findall(r"(PLAIT_[A-Z_]+)=", " ".join(image.all("ENV")))
    for name in [*environment, *in_image]:
        assert name.removeprefix("PLAIT_").lower() in Settings.model_fields, name
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert settings.port == 8400
    assert settings.store_url == "s3://plait/objects"
    assert settings.store_options == json.loads(environment["PLAIT_STORE_OPTIONS"])


@pytest.mark.parametrize("path", DOCKERFILES)
def test_a_dockerfile_copies_what_is_there_and_all_that_the_wheel_needs(path: str) -> None:
    sources = Dockerfile.read(ROOT / path).copied_from_context()
    for source in sources:
        assert (ROOT / source).exists(), source
    let_in = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert set(sources) <= let_in

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*wheel["packages"], *wheel["force-include"], project["project"]["readme"]]
    for each in needed:
        assert each.split("/")[0] in sources, each


@pytest.mark.parametrize("path", DOCKERFILES)
def test_an_image_installs_extras_that_exist_and_runs_as_nobody_special(path: str) -> None:
    dockerfile = Dockerfile.read(ROOT / path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert dockerfile.extras()
    assert set(dockerfile.extras()) <= set(project["project"]["optional-dependencies"])
    last = dockerfile.last_stage()
    assert last.all("USER") == ["plait"]
    assert any("useradd --uid 10001" in run for run in last.all("RUN"))
    assert last.words_of("ENTRYPOINT") == ["plait"]


def test_every_dockerfile_is_built_by_a_service() -> None:
    built = [service["build"]["dockerfile"] for service in SERVICES.values() if "build" in service]
    assert sorted(built) == sorted(DOCKERFILES)


def plait_commands() -> list[list[str]]:
    """What the images and the services run, as words after `plait`."""
    commands = [Dockerfile.read(ROOT / path).words_of("CMD") for path in DOCKERFILES]
    return commands + [service["command"] for service in SERVICES.values() if "build" in service]


@pytest.mark.parametrize("words", plait_commands(), ids=" ".join)
def test_what_the_images_run_is_on_the_command_line(words: list[str]) -> None:
    subcommand = [word for word in words[:1] if not word.startswith("-")]
    ran = subprocess.run(
        [sys.executable, "-c", "from plait_client.cli import main; main()", *subcommand, "--help"],
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    for option in (word for word in words if word.startswith("--")):
        assert option in ran.stdout, option
