"""`POLICY@REF`, as it is written on the command line."""

from plait.errors import DocumentInvalid, UsageError
from plait.lineage import parse_ref
from plait.manifest import check_name

DEFAULT_REF = "main"


def split_ref(text: str, *, default: str = DEFAULT_REF) -> tuple[str, str]:
    """Policy and REF of `P@REF`; `P` alone means its default channel.

    Raises:
        UsageError: no policy's name, or no REF.
    """
    policy, at, ref = text.partition("@")
    try:
        check_name(policy, "policy")
    except DocumentInvalid as error:
        raise UsageError(error.message, remedy="expected POLICY or POLICY@REF") from error
    return policy, str(parse_ref(ref if at else default))
