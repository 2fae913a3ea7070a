"""Keys of content-addressed objects."""

import pytest

from plait.canonical import digest_of
from plait.errors import FormatError
from plait.store import check_key, digest_of_key, object_key

DIGEST = digest_of(b"weights")
HEX = DIGEST.removeprefix("sha256:")


def test_a_key_is_the_digest_and_a_nonce() -> None:
    assert object_key(DIGEST, "0a1B") == f"sha256/{HEX[:2]}/{HEX}-0a1B"


def test_a_key_leads_back_to_its_digest_and_fits_a_store() -> None:
    assert digest_of_key(check_key(object_key(DIGEST))) == DIGEST


def test_two_uploads_of_the_same_bytes_have_keys_of_their_own() -> None:
    assert len({object_key(DIGEST) for _ in range(100)}) == 100


@pytest.mark.parametrize("digest", ["", HEX, f"md5:{HEX}", f"sha256:{HEX.upper()}", DIGEST[:-1]])
def test_what_is_no_digest_has_no_key(digest: str) -> None:
    with pytest.raises(FormatError, match="digest"):
        object_key(digest)


@pytest.mark.parametrize("nonce", ["", "../../x", "a/b", "a-b", "x" * 65])
def test_a_nonce_is_letters_and_digits(nonce: str) -> None:
    with pytest.raises(FormatError, match="nonce"):
        object_key(DIGEST, nonce)


@pytest.mark.parametrize(
    "key",
    ["", "a", f"sha256/00/{HEX}-n", f"sha256/{HEX[:2]}/{HEX}", f"x/sha256/{HEX[:2]}/{HEX}-n"],
)
def test_another_key_names_no_digest(key: str) -> None:
    with pytest.raises(FormatError, match="names no digest"):
        digest_of_key(key)
