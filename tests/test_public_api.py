"""What each package offers is a sorted list under test, and all of it is there."""

from importlib import import_module

import pytest

PACKAGES = {
    "plait.codec": None,
    "plait.cut": None,
    "plait.grain": None,
    "plait.store": None,
    "plait.tensors": None,
    "plait.wire": None,
    "plait_client": {"CheckpointFolder", "ChunkCache", "Fetcher", "RegistryClient"},
    "plait_rollout": {
        "DeltaSource",
        "DirectoryLoader",
        "DirectoryReplica",
        "Engine",
        "FollowOptions",
        "Follower",
        "InPlaceReplica",
        "LocalApi",
        "ModuleLoader",
        "Move",
        "MoveStep",
        "ReloadReplica",
        "Replica",
        "Status",
        "TorchModuleEngine",
    },
    "plait_trainer": None,
}


def _order(name: str) -> tuple[bool, bool, str]:
    """Constants, then classes, then functions: as the linter sorts them."""
    return not name.isupper(), not name[0].isupper(), name


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_package_offers_what_its_list_says(name: str) -> None:
    package = import_module(name)
    assert list(package.__all__) == sorted(package.__all__, key=_order)
    for public in package.__all__:
        assert getattr(package, public) is not None
    frozen = PACKAGES[name]
    assert frozen is None or set(package.__all__) == frozen


@pytest.mark.parametrize("name", ["plait_client", "plait_rollout"])
def test_a_name_that_is_not_offered_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match="nothing"):
        import_module(name).nothing  # noqa: B018
