"""Reads the few Dockerfile instructions that these tests ask about."""

import json
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Dockerfile:
    """Attributes:
    instructions: name and arguments, continuation lines joined, comments left out.
    """

    instructions: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, path: Path) -> "Dockerfile":
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
        found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
        return cls(tuple((name, rest.strip()) for name, _, rest in found))

    def all(self, name: str) -> list[str]:
        return [rest for each, rest in self.instructions if each == name]

    def last_stage(self) -> "Dockerfile":
        starts = [n for n, (name, _) in enumerate(self.instructions) if name == "FROM"]
        return Dockerfile(self.instructions[starts[-1] :])

    def copied_from_context(self) -> list[str]:
        """Sources of every COPY that reads the build context."""
        copies = [rest.split() for rest in self.all("COPY") if "--from=" not in rest]
        return [source for words in copies for source in words[:-1]]

    def extras(self) -> list[str]:
        """The extras of plait that are installed."""
        found = re.findall(r'"\.\[([a-z0-9,]+)\]"', " ".join(self.all("RUN")))
        return [extra for each in found for extra in each.split(",")]

    def words_of(self, name: str) -> list[str]:
        """The exec form of the last CMD or ENTRYPOINT."""
        words = json.loads(self.all(name)[-1])
        assert isinstance(words, list)
        return words
