"""The API against its own description: whatever is sent, never a 500, always what is described."""

import subprocess
import sys
from pathlib import Path

from plait.store import MemoryStore
from plait_server.app import create_app
from plait_server.catalog import SqlCatalog
from plait_server.settings import Settings
from tests.server.lines import grown_line
from tests.server.processes import registry_process

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance"
)


def test_no_input_makes_the_registry_fail(tmp_path: Path) -> None:
    with registry_process(tmp_path) as registry:
        grown_line(registry.http, 2, policy="chat-7b")
        command = [
            str(Path(sys.executable).with_name("schemathesis")), "run",
            f"{registry.url}/openapi.json", "--checks", CHECKS,
            "--phases", "examples,coverage,fuzzing", "--max-examples", "12", "--max-time", "25",
            "--continue-on-failure", "--request-timeout", "20", "--seed", "7",
            "--generation-database", ":memory:", "--no-shrink", "--no-color", "--warnings", "off",
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout[-20000:] + done.stderr
        assert registry.http.get("/readyz").status_code == 200
        log = registry.log.read_text()
    assert "Traceback" not in log, log


def test_every_operation_is_described(tmp_path: Path) -> None:
    catalog = SqlCatalog(f"sqlite:///{tmp_path}/plait.db")
    described = create_app(Settings(), catalog=catalog, store=MemoryStore()).openapi()
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    assert len(operations) >= 25
    for operation in operations:
        assert operation["summary"]
        assert operation["description"]
        assert operation["tags"]
        assert "4XX" in operation["responses"]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    catalog.close()
