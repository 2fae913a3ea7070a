"""Publishing from a `transformers.Trainer`, or one of TRL's: add a callback, and nothing else.

    trainer.add_callback(PlaitCallback(policy="my-policy", every=4))

The only file of this package that imports transformers.
"""

import inspect
import logging
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import TrainerCallback

from plait.errors import CheckpointInvalid, PlaitError, UsageError
from plait.names import check_name
from plait_client.registry import RegistryClient
from plait_trainer.loop import PublishingLoop
from plait_trainer.options import check_whole
from plait_trainer.publisher import Publisher
from plait_trainer.remedies import beginning_training, in_training, told
from plait_trainer.state import state_of

logger = logging.getLogger("plait.trainer")

# In a checkpoint's folder, one for each process.
STATE_FILE: Final = "plait_publisher_{rank}.pt"


class PlaitCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Publishes the model every K optimizer steps, and at every checkpoint that is saved.

    Each checkpoint is therefore a version. What of it isn't committed yet, or never will be,
    travels in the checkpoint, so that a run that resumes from it continues the same line. The
    line's first version is the model as training begins, its last one the model that training
    leaves, which may be an earlier, better one. Config and tokenizer travel with anchors.

    Args:
        policy: that the versions belong to.
        every: optimizer steps for one version.
        client: of the registry; by default as the environment says (`PLAIT_URL`).
        rebase: go on from the version that a checkpoint is or comes from even if the channel has
            gone on, or was moved back, since it was saved. Otherwise that is refused.
        options: of the `Publisher`.

    Raises:
        UsageError: `every` isn't a whole number of at least 1, or there is no such option.
        DocumentInvalid: no policy can have this name.

    A refused publish (the head moved, say) ends training with its error: what was trained since is
    in the trainer's own checkpoint.
    """

    def __init__(
        self,
        *,
        policy: str,
        every: int = 1,
        client: RegistryClient | None = None,
        rebase: bool = False,
        **options: Any,
    ) -> None:
        # Whatever can be told before a model is set up is told before.
        self._policy, self._every = check_name(policy, "policy"), check_whole(every, "every")
        self._client, self._rebase, self._options = client, rebase, _checked(options)
        self._loop: PublishingLoop | None = None

    @property
    def loop(self) -> PublishingLoop:
        """The loop of the training that goes on.

        Raises:
            UsageError: none does.
        """
        if self._loop is None:
            raise UsageError("no training goes on", remedy="add the callback before train()")
        return self._loop

    def on_train_begin(self, args: Any, state: Any, _control: Any, **held: Any) -> None:
        if (failed := self._loop) is not None:
            # Callbacks aren't told of training that fails: what it published is committed first.
            self._loop = None
            try:
                failed.close()
            except PlaitError as error:
                # What the weights are now is looked up by their content, whatever became of it.
                logger.warning("the training before left a publish that failed: %s", error)
        # Side files go with the line's anchor only, which is committed before this returns.
        with tempfile.TemporaryDirectory(prefix="plait-side-files-") as folder:
            _write_side_files(Path(folder), held["model"], held.get("processing_class"))
            # The model that callbacks are given doesn't tell that it is wrapped in DDP.
            group = True if args.world_size > 1 else None
            options = {"side_files": folder, "group": group, **self._options}
            with told(beginning_training):
                loop = PublishingLoop(
                    held["model"], _bare(held.get("optimizer")),
                    policy=self._policy, every=self._every, client=self._client,
                    state=self._saved_state(args, state), rebase=self._rebase, **options,
                )  # fmt: skip
                try:
                    loop.count_from(int(state.global_step))
                    loop.begin(_facts(state, held))
                except BaseException:
                    loop.close(abandon=True)
                    raise
        self._loop = loop

    @told(in_training)
    def on_step_end(self, _args: Any, state: Any, _control: Any, **held: Any) -> None:
        self.loop.step(_facts(state, held))

    @told(in_training)
    def on_save(self, args: Any, state: Any, _control: Any, **held: Any) -> None:
        if not self.loop.is_published:
            self.loop.publish(_facts(state, held))
        path = _state_file(args, state)
        if path.parent.is_dir():
            _save(self.loop.state_dict(), path)

    @told(in_training)
    def on_train_end(self, args: Any, state: Any, _control: Any, **held: Any) -> None:
        loop, self._loop = self.loop, None
        facts = _facts(state, held)
        try:
            if args.load_best_model_at_end and state.best_global_step is not None:
                # The model isn't the last step's any more, unless that was the best.
                facts["step"] = int(state.best_global_step)
                if facts["step"] != state.global_step:
                    loop.publish(facts)
        except BaseException:
            loop.close()
            raise
        loop.finish(facts)

    def _saved_state(self, args: Any, state: Any) -> Mapping[str, Any] | None:
        """What the loop left in the checkpoint that is resumed; None: none is. Another run's is
        harmless: the weights decide.

        Of several processes some may have no file: with more of them than there were, say. Theirs
        is a state that says nothing, since all of them must load one, or none.
        """
        steps, path = int(state.global_step), _state_file(args, state)
        if steps == 0:
            return None
        if path.is_file():
            return _load(path)
        channel = self._options.get("channel", "main")
        return {"steps": steps, "publisher": state_of(self._policy, channel, None)}


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    own = {"model", "optimizer", "client", "policy", "attach"}
    known = set(inspect.signature(Publisher).parameters) - own
    if unknown := sorted(set(options) - known):
        raise UsageError(
            f"PlaitCallback has no option {', '.join(unknown)}",
            remedy=f"there are {', '.join(sorted(known))}",
        )
    return options


def _state_file(args: Any, state: Any) -> Path:
    """Of the checkpoint that a trainer saves at this step, or resumes from."""
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    return folder / STATE_FILE.format(rank=args.process_index)


def _save(state: Mapping[str, Any], path: Path) -> None:
    """Whole or not at all: a checkpoint without the file can still be resumed by its weights."""
    beside = path.with_suffix(".new")
    torch.save(state, beside)
    beside.replace(path)


def _load(path: Path) -> Mapping[str, Any]:
    """
    Raises:
        CheckpointInvalid: it can't be read.
    """
    try:
        saved: Mapping[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointInvalid(
            f"{path} can't be read: {error}",
            remedy="resume from another checkpoint; or without this file, if the checkpoint's "
            "weights are a version",
        ) from error
    return saved


def _facts(state: Any, held: dict[str, Any]) -> dict[str, Any]:
    """Training facts for the version record."""
    facts: dict[str, Any] = {"step": int(state.global_step)}
    if state.epoch is not None:
        facts["epoch"] = float(state.epoch)
    optimizer = _bare(held.get("optimizer"))
    if optimizer is not None and optimizer.param_groups:
        facts["learning_rate"] = float(optimizer.param_groups[0]["lr"])
    return facts


def _bare(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer inside accelerate's wrapper."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def _write_side_files(folder: Path, model: Any, processing_class: Any) -> None:
    """The model's configuration and its tokenizer or processor."""
    parts: tuple[Any, ...] = (
        model.config, getattr(model, "generation_config", None), processing_class,
    )  # fmt: skip
    for part in parts:
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)
