"""Messages show a registry's address without the user and password that it may hold."""

import pytest

from plait.errors import PlaitError, UsageError
from plait_client.address import shown
from plait_client.registry import RegistryClient


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8400", "http://127.0.0.1:8400"),
        ("https://ann:hunter2@registry:8400/p", "https://***@registry:8400/p"),
        ("https://ann:hun/ter@2@registry", "https://***@registry"),
        ("ann:hunter2@registry", "***@registry"),
    ],
)
def test_an_address_is_shown_without_its_credentials(url: str, expected: str) -> None:
    assert shown(url) == expected


def test_an_unreachable_registry_is_named_without_its_password() -> None:
    with (
        RegistryClient("http://ann:hunter2@127.0.0.1:9", attempts=1) as client,
        pytest.raises(PlaitError, match=r"http://\*\*\*@127\.0\.0\.1:9") as raised,
    ):
        client.config()
    assert "hunter2" not in str(raised.value)


def test_an_impossible_address_is_refused_without_its_password() -> None:
    with pytest.raises(UsageError) as raised:
        RegistryClient("http://ann:hunter2@registry:port")
    assert "hunter2" not in str(raised.value)
    assert "hunter2" not in raised.value.remedy
