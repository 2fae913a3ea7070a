"""`POLICY@REF`, as it is written on the command line."""

from plait.errors import DocumentInvalid, UsageError
from plait.lineage import parse_ref
from plait.names import check_name

DEFAULT_REF = "main"


def split_ref(text: str, *, default: str = DEFAULT_REF) -> tuple[str, str]:
    """Policy and REF of `P@REF`; `P` alone means its default channel.

    Raises:
        UsageError: no policy's name, or no REF.
    """
    policy, at, ref = text.partition("@")
    usable_name(policy, "policy", remedy="expected POLICY or POLICY@REF")
    return policy, str(parse_ref(ref if at else default))


def usable_name(name: str, noun: str, *, remedy: str = "") -> str:
    """The name, if a policy, channel or replica can have it.

    Raises:
        UsageError: none can.
    """
    try:
        return check_name(name, noun)
    except DocumentInvalid as error:
        raise UsageError(error.message, remedy=remedy) from error
