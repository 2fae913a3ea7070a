"""Layouts and cuts: taken in by digest, and what the commit's checks need to know of them."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from plait import canonical, cut, layout
from plait.cut import Cut
from plait.errors import DigestMismatch, DocumentInvalid, NotFound, UnsupportedFormat
from plait.layout import Layout
from plait_server.catalog import Catalog, StoredDocument

ACCEPTED: Final = (layout.FORMAT, cut.FORMAT)
_REMEMBERED: Final = 64  # layouts and cuts of one policy rarely change


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """What a commit is checked against."""

    digest: str
    total_elements: int
    dense_bytes: int
    total_words: int


@dataclass(frozen=True, slots=True)
class CutFacts:
    """What a commit is checked against.

    Attributes:
        covers: every word of its layout occurs exactly once.
        size: bytes of the document.
    """

    digest: str
    layout: str
    frames: int
    covers: bool
    size: int


class Documents:
    """The door for canonical documents, with the facts about those that were seen lately."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._facts: OrderedDict[str, LayoutFacts | CutFacts] = OrderedDict()
        self._lock = threading.Lock()
        # One at a time: parsed, a large document takes many times its size.
        self._parsing = threading.RLock()

    def put(self, digest: str, data: bytes) -> bool:
        """Takes in a layout or a cut; returns whether it is new.

        Raises:
            DigestMismatch: other bytes than the name says.
            FormatError: not one of these documents.
        """
        found = canonical.digest_of(data)
        if found != digest:
            raise DigestMismatch(
                f"document {digest} has the digest {found}", expected=digest, found=found
            )
        if self._recall(digest) is not None:
            return False
        with self._parsing:
            format_ = _parsed_format(data)
        return self._catalog.put_document(StoredDocument(digest, format_, data))

    def layout(self, digest: str) -> Layout:
        """A layout itself.

        Raises:
            NotFound, DocumentInvalid: no such document, or not a layout.
        """
        data = self._data(digest, layout.FORMAT)
        with self._parsing:
            return Layout.parse(data)

    def layout_facts(self, digest: str) -> LayoutFacts:
        """Raises NotFound, DocumentInvalid."""
        known = self._recall(digest)
        if known is None:
            found = self.layout(digest)
            known = LayoutFacts(digest, found.total_elements, found.dense_bytes, found.total_words)
            self._remember(known)
        if not isinstance(known, LayoutFacts):
            raise DocumentInvalid(f"document {digest} is not a layout")
        return known

    def cut_facts(self, digest: str) -> CutFacts:
        """Raises NotFound, DocumentInvalid: also if it doesn't fit its layout."""
        known = self._recall(digest)
        if known is None:
            with self._parsing:
                known = self._recall(digest) or self._read_cut(digest)
            self._remember(known)
        if not isinstance(known, CutFacts):
            raise DocumentInvalid(f"document {digest} is not a cut")
        return known

    def _read_cut(self, digest: str) -> CutFacts:
        data = self._data(digest, cut.FORMAT)
        parsed = Cut.parse(data)
        covers = parsed.covers(self.layout(parsed.layout_digest))
        return CutFacts(digest, parsed.layout_digest, len(parsed.frames), covers, len(data))

    def _data(self, digest: str, format_: str) -> bytes:
        try:
            stored = self._catalog.document(digest)
        except NotFound as error:
            raise DocumentInvalid(
                f"the registry has no document {digest}",
                remedy=f"send it first: PUT /v1/documents/{digest}",
                digest=digest,
            ) from error
        if stored.format != format_:
            raise DocumentInvalid(f"document {digest} is a {stored.format}, not a {format_}")
        return stored.data

    def _recall(self, digest: str) -> LayoutFacts | CutFacts | None:
        with self._lock:
            if digest in self._facts:
                self._facts.move_to_end(digest)
            return self._facts.get(digest)

    def _remember(self, facts: LayoutFacts | CutFacts) -> None:
        with self._lock:
            self._facts[facts.digest] = facts
            while len(self._facts) > _REMEMBERED:
                self._facts.popitem(last=False)


def _parsed_format(data: bytes) -> str:
    """The document's format, once it has been parsed as that."""
    # Which of the two is told by the first bytes of the one that parses.
    for format_, parse in ((layout.FORMAT, Layout.parse), (cut.FORMAT, Cut.parse)):
        try:
            parse(data)
        except UnsupportedFormat:
            continue
        return format_
    raise UnsupportedFormat(f"the registry takes documents of {' and '.join(ACCEPTED)} only")
