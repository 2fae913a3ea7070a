"""A plan is the registry's claim: one that contradicts itself is refused before the first write."""

from collections.abc import Callable
from pathlib import Path

import pytest

from plait.errors import DocumentInvalid
from plait.wire import HeldState, PlanDocument
from plait_client.checkout import checkout
from plait_client.fetch import Fetcher
from plait_client.plans import check_plan
from plait_client.registry import RegistryClient
from tests.client import checkpoints
from tests.client.checkpoint_line import Line, make_line

Change = Callable[[PlanDocument], PlanDocument]


@pytest.fixture
def line(fetcher: Fetcher, policy: str, tmp_path: Path) -> Line:
    return make_line(fetcher, policy, tmp_path / "in", 3)


def without_steps(plan: PlanDocument) -> PlanDocument:
    return plan.model_copy(update={"steps": []})


def without_the_last_step(plan: PlanDocument) -> PlanDocument:
    return plan.model_copy(update={"steps": plan.steps[:-1]})


def out_of_order(plan: PlanDocument) -> PlanDocument:
    return plan.model_copy(update={"steps": plan.steps[::-1]})


def to_another_state(plan: PlanDocument) -> PlanDocument:
    return plan.model_copy(update={"fingerprint": "0" * 32})


@pytest.mark.parametrize(
    "change", [without_steps, without_the_last_step, out_of_order, to_another_state]
)
def test_a_plan_that_does_not_lead_where_it_says_changes_nothing(
    client: RegistryClient, fetcher: Fetcher, line: Line, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, change: Change,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    checkout(client, line.ref(1), out, fetcher=fetcher)
    state = (out / ".plait/state.json").read_bytes()
    honest = RegistryClient.plan

    def lying(*args: object, **kwargs: object) -> PlanDocument:
        return change(honest(*args, **kwargs))  # type: ignore[arg-type]

    monkeypatch.setattr(RegistryClient, "plan", lying)
    with pytest.raises(DocumentInvalid, match="contradicts itself"):
        checkout(client, line.ref(3), out, fetcher=fetcher)
    assert checkpoints.read(out) == checkpoints.expected(line.versions[0])
    assert (out / ".plait/state.json").read_bytes() == state


def test_an_honest_plan_passes_from_anything(client: RegistryClient, line: Line) -> None:
    policy = line.policy
    check_plan(client.plan(policy, None, "3"), None)
    version = client.version(policy, "1")
    held = HeldState(layout_digest=version.layout_digest, fingerprint=version.fingerprint)
    for to in ("1", "2", "3"):
        check_plan(client.plan(policy, held, to), held)
        check_plan(client.plan(policy, held, to, allow_anchor=False), held)
    with pytest.raises(DocumentInvalid):
        check_plan(client.plan(policy, held, "3", allow_anchor=False), None)
