"""Where a publisher stands: found by content, by all of its processes together, and taken up."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from plait.errors import BaseMismatch, PublishError, UsageError
from plait.layout import Layout
from plait.names import check_name
from plait.store import Store
from plait.weights import Weights
from plait.wire import VersionDocument
from plait_client.registry import RegistryClient
from plait_trainer.asking import ask
from plait_trainer.committer import Committer
from plait_trainer.departure import Departure
from plait_trainer.dtypes import DtypeRule
from plait_trainer.group import LEADER
from plait_trainer.line import Line
from plait_trainer.options import check_actor
from plait_trainer.patience import Patience
from plait_trainer.peers import Peers
from plait_trainer.pipeline import Pipeline
from plait_trainer.read_back import read_back
from plait_trainer.resume import Claim, Origins, compare
from plait_trainer.sharing import Division
from plait_trainer.standing import Standing, find_standing
from plait_trainer.state import TrainerState
from plait_trainer.steps import Uncommitted
from plait_trainer.tracking import Proven, TrackedModel

logger = logging.getLogger("plait.trainer")
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What a publisher was told about its line; see `Publisher`.

    Raises:
        DocumentInvalid: a policy or channel can't have that name.
        UsageError: an actor or a store that there can't be.
    """

    policy: str
    channel: str
    new_anchor: bool
    external: bool
    side_files: Path | None
    actor: str
    store: Store | None
    dtypes: DtypeRule = field(default_factory=DtypeRule)
    ties: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.policy, "policy")
        check_name(self.channel, "channel")
        check_actor(self.actor)
        if self.store is not None and not isinstance(self.store, Store):
            raise UsageError(
                f"store is {self.store!r:.80}; expected one of plait.store",
                remedy="open it with plait.store.open_store",
            )

    def tell_unmatched(self, layout: Layout) -> None:
        """Warns of what was said about names that no published tensor has: misspelt, perhaps."""
        names = {tensor.name for tensor in layout.tensors}
        odd = [f"dtypes {pattern!r}" for pattern in self.dtypes.unmatched(names)]
        odd += [f"ties {name!r}" for name in self.ties.values() if name not in names]
        if odd:
            logger.warning("no published tensor has the name of %s", ", ".join(odd))

    def line(self, division: Division) -> Line:
        return Line(
            self.policy, self.channel, division,
            external=self.external, side_files=self.side_files, actor=self.actor, store=self.store,
        )  # fmt: skip


class Attachment:
    """Attaches, rebases and resumes, while nothing is under way. One caller at a time.

    Attributes:
        holds_version: whether the model was known to be the version that it was attached at.
    """

    def __init__(
        self,
        client: RegistryClient,
        settings: Settings,
        *,
        model: TrackedModel,
        peers: Peers,
        pipeline: Pipeline,
        patience: Patience,
    ) -> None:
        self._client, self._settings = client, settings
        self._model, self._peers, self._pipeline = model, peers, pipeline
        self._patience = patience
        # What was loaded, until it is taken up, or the weights are attached by themselves.
        self._state: TrainerState | None = None
        self.holds_version = False

    @property
    def version(self) -> VersionDocument | None:
        committer = self._pipeline.committer
        return None if committer is None else committer.standing.parent

    def attach(self, base: Weights | None) -> None:
        """As `Publisher.attach`."""
        self._peers.open()
        self._state = None
        self._attach(base)

    def load(self, state: Mapping[str, Any]) -> None:
        """As `Publisher.load_state_dict`."""
        self._peers.open()
        policy, channel = self._settings.policy, self._settings.channel
        read: list[TrainerState] = []
        self._peers.agree(
            "read the checkpoint",
            lambda: read.append(TrainerState.read(state, policy, channel)),
        )
        [saved] = read
        self._ask(
            "find the checkpoint's version", lambda: saved.require_known(self._client, policy)
        )
        self._state = saved
        origins = self._attach(None)
        self._compare(saved, origins)

    def rebase(self, to: int | str | None, base: Weights | None) -> None:
        """As `Publisher.rebase`."""
        self._peers.open()
        departure = self._ask("find the version", lambda: self._departure(to))
        target, standing = departure.version, departure.standing
        if (committer := self._pipeline.committer) is not None:
            self._peers.keeper.run(committer.find_out)
        if base is None and committer is not None and self._stands_on(target):
            committer.stand(standing)
            departure.tell()
            return
        origins = self._origins(base)
        found = origins.proven
        proven = origins.back_at(target.fingerprint)
        if proven is None or found.division.layout.digest != target.layout_digest:
            raise BaseMismatch(
                f"the weights at hand (fingerprint {found.fingerprint}) are not version "
                f"{target.seq} ({target.fingerprint})",
                remedy=f"load version {target.seq} into the model, or pass its weights as "
                "base; or name the version that this trainer last committed",
            )
        self._take_up(proven, standing)
        self.holds_version = base is None and proven is found
        departure.tell()

    def read_back(self, names: Collection[str]) -> Weights:
        """The state of the last publish, for a detector that can't tell it any more. Called while
        nothing is under way.

        Raises:
            PublishError: there is no version yet.
        """
        committer = self._pipeline.committer
        if committer is None or (parent := committer.standing.parent) is None:
            raise PublishError(
                f"{self._settings.policy!r} has no version yet that "
                f"{', '.join(sorted(names)[:8])} could be read back from",
                remedy="attach again",
            )
        share, pending, store = self._model.share, committer.pending, self._settings.store
        return self._patience.get(
            lambda: read_back(self._client, parent, share, pending, names, store=store)
        )

    def _attach(self, base: Weights | None) -> Origins:
        settings, origins = self._settings, self._origins(base)
        found = origins.proven
        standing = self._ask(
            "find the standing",
            lambda: find_standing(
                self._client, settings.policy, settings.channel, layout=found.division.layout,
                fingerprints=origins.fingerprints, new_anchor=settings.new_anchor,
                hint=origins.hint,
            ),
        )  # fmt: skip
        parent = standing.parent
        proven = found if parent is None else origins.back_at(parent.fingerprint)
        assert proven is not None  # it was found by one of these fingerprints
        self._take_up(proven, standing)
        self.holds_version = parent is not None and base is None and proven is found
        logger.info("%s attached: %s", settings.policy, standing.in_words(found.fingerprint))
        return origins

    def _compare(self, saved: TrainerState, origins: Origins) -> None:
        """Says in the log that a checkpoint is gone on from at another version than its own.

        What was in flight when it was saved, and was committed since, is as expected.
        """
        now = None if self.version is None else self.version.seq
        says_nothing = saved.seq is None and saved.changes is None
        if says_nothing or now == saved.seq:
            return
        expected = origins.changes is not None and now is not None and now > (saved.seq or 0)
        logger.log(
            logging.INFO if expected else logging.WARNING,
            "the checkpoint of %s was written at %s, and continues from %s",
            self._settings.policy, _named(saved.seq), _named(now),
        )  # fmt: skip

    def _origins(self, base: Weights | None) -> Origins:
        """What the weights are, and what they are known to come from."""
        proven, state = self._model.prove(base), self._state
        if self._peers.rank == LEADER:
            self._settings.tell_unmatched(proven.division.layout)
        if base is not None or state is None:
            return Origins.alone(proven)
        own: list[Uncommitted | None] = []

        def claim() -> Claim:
            claim, changes = compare(state.changes, proven)
            own.append(changes)
            return claim

        claims = self._peers.agree("compare with the checkpoint", claim)
        return Origins.of(proven, own[0], claims)

    def _take_up(self, proven: Proven, standing: Standing) -> None:
        """Everything is proven: forget the earlier state, and start from this one."""
        self.holds_version = False
        self._pipeline.start_from(None)
        self._model.start_from(proven)
        line = self._settings.line(proven.division)
        self._pipeline.start_from(
            Committer(self._client, line, standing, self._patience, self._peers.commits)
        )
        self._state = None

    def _ask(self, step: str, question: Callable[[], T]) -> T:
        return ask(self._peers, self._patience, step, question)

    def _departure(self, to: int | str | None) -> Departure:
        return Departure.find(self._client, self._settings.policy, self._settings.channel, to)

    def _stands_on(self, version: VersionDocument) -> bool:
        parent = self.version
        return parent is not None and (parent.layout_digest, parent.fingerprint) == (
            version.layout_digest,
            version.fingerprint,
        )


def _named(seq: int | None) -> str:
    return "no version" if seq is None else f"version {seq}"
