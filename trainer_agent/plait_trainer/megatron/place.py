"""Where a process stands in Megatron-Core's parallel grids."""

from dataclasses import dataclass

from plait.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ParallelPlace:
    """A process's ranks. A size of 1 is no parallelism of that kind.

    Processes that differ in nothing but data or context parallelism hold the same, and have no
    ranks for it here.

    Attributes:
        tp_rank, tp_size: tensor parallel.
        ep_rank, ep_size: expert parallel.
        etp_rank, etp_size: tensor parallel of the experts; as tp where it isn't given.
        pp_rank, pp_size: pipeline stage.
        vp_rank, vp_size: which of the stage's model chunks (virtual pipeline).
        layers: indices of the chunk's layers, where stages are uneven; by default even ones.

    Raises:
        UsageError: a rank outside of its size.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int | None = None
    etp_size: int | None = None
    pp_rank: int = 0
    pp_size: int = 1
    vp_rank: int = 0
    vp_size: int = 1
    layers: range | None = None

    def __post_init__(self) -> None:
        for kind in ("tp", "ep", "etp", "pp", "vp"):
            rank, size = self.of(kind)
            if not 0 <= rank < size:
                raise UsageError(f"{kind}_rank is {rank}; expected 0 to {size - 1}")

    @classmethod
    def of_rank(
        cls, rank: int, world: int, *, tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None
    ) -> "ParallelPlace":
        """From a global rank, in Megatron-Core's default order (tp, cp, ep, dp, pp).

        Raises:
            UsageError: the world isn't a multiple of the sizes' products.
        """
        etp = tp if etp is None else etp
        stage = world // pp
        if world % pp or stage % tp or stage % (etp * ep):
            raise UsageError(
                f"{world} processes aren't a multiple of pp={pp} times tp={tp}, or times "
                f"etp={etp} times ep={ep}"
            )
        pp_rank, inside = divmod(rank, stage)
        return cls(
            tp_rank=inside % tp, tp_size=tp,
            ep_rank=inside // etp % ep, ep_size=ep,
            etp_rank=inside % etp, etp_size=etp,
            pp_rank=pp_rank, pp_size=pp,
        )  # fmt: skip

    def of(self, kind: str) -> tuple[int, int]:
        """Rank and size in one kind of parallelism: tp, ep, etp, pp or vp."""
        if kind == "etp" and self.etp_size is None:
            kind = "tp"
        rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
        return (0 if rank is None else rank), size

    @property
    def is_first(self) -> bool:
        """Whether the embedding is in this chunk."""
        return self.pp_rank == 0 and self.vp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether the final norm and the output layer are in this chunk."""
        return self.pp_rank == self.pp_size - 1 and self.vp_rank == self.vp_size - 1

    def layers_of(self, layers: int) -> range:
        """Indices, in the model, of the layers that this chunk numbers from 0.

        Raises:
            UsageError: they can't be dealt out evenly.
        """
        if self.layers is not None:
            if not 0 <= self.layers.start <= self.layers.stop <= layers or self.layers.step != 1:
                raise UsageError(f"layers {self.layers} aren't among the model's {layers}")
            return self.layers
        chunks = self.pp_size * self.vp_size
        if layers % chunks:
            raise UsageError(
                f"{layers} layers can't be dealt out to {chunks} pipeline chunks evenly",
                remedy="give each place the indices of its layers (layers=range(…))",
            )
        count = layers // chunks
        first = (self.vp_rank * self.pp_size + self.pp_rank) * count
        return range(first, first + count)
