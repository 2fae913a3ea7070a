"""The registry's settings: environment variables, which the command line's options override."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Each is the variable PLAIT_NAME.

    Attributes:
        data: folder of the default database and the default store.
        database_url: SQLite or PostgreSQL; default: `plait.db` in `data`.
        store: URL of the store; default: `objects` in `data`.
        store_options: JSON object of the bucket's settings.
        direct_store: the store's URL as agents may use it themselves; told to them at /v1/config.
        host, port: where to listen; port 0 picks a free one.
        token: if set, every request below /v1 must carry it as a bearer token.
        upload_memory_bytes: uploads that are held in memory at once; more of them wait.
    """

    model_config = SettingsConfigDict(env_prefix="PLAIT_", extra="ignore", frozen=True)

    data: Path = Path(".plait-data")
    database_url: str | None = None
    store: str | None = None
    store_options: dict[str, Any] | None = None
    direct_store: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8400
    token: SecretStr | None = None
    upload_memory_bytes: Annotated[int, Field(ge=1 << 27)] = 1 << 29

    @property
    def database(self) -> str:
        """The database's URL."""
        return self.database_url or f"sqlite:///{self.data.absolute() / 'plait.db'}"

    @property
    def store_url(self) -> str:
        return self.store or str(self.data.absolute() / "objects")
