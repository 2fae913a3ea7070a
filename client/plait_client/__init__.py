"""The client: the registry as Python calls, verified downloads, checkouts, the `plait` command."""

from importlib.metadata import version

__version__ = version("plait")
