"""One run of the demo: everything that it needs is started, and stopped again whatever happens."""

import os
import platform
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from plait_client.registry import RegistryClient
from plait_demo.engines import Host, ModuleHost, SglangHost
from plait_demo.fleet import Fleet
from plait_demo.model import ModelName, base_model
from plait_demo.processes import Child, free_port, plait_command
from plait_demo.proofs import Proofs
from plait_demo.scenario import Scenario, play
from plait_demo.settings import POLICY, Settings, settings_of
from plait_demo.table import Show

_ENGINES = ("engine-a", "engine-b")
_REGISTRY_START_S = 60.0


def run_demo(
    model: ModelName, *, sglang: bool, cache: Path, folder: Path, console: Console
) -> dict[str, Any]:
    """Plays the demo and returns its summary.

    Args:
        cache: keeps converted models.
        folder: gets a folder for this run, which stays if a proof failed, for its logs.

    Raises:
        PlaitError: the registry or the engines don't start, or there is no base model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="run-", dir=folder)).resolve()
    settings = settings_of(model, sglang=sglang, cache=cache, home=home)
    show, proofs = Show(console), Proofs()
    interrupts = signal.getsignal(signal.SIGINT)
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, interrupts)
        scenario = _set_up(settings, show, proofs, stack.enter_context)
        # A second Ctrl-C mustn't cut the stopping short.
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        play(scenario)
        show.step("stopping everything")
    show.verdict(proofs.all, proofs.passed)
    if proofs.passed:
        shutil.rmtree(home)
    else:
        show.step(f"logs: {home}")
    return _summary(settings, show, proofs)


def _set_up(settings: Settings, show: Show, proofs: Proofs, keep: Callable[[Any], Any]) -> Scenario:
    show.step(f"base model: {settings.model}")
    base = base_model(settings.model, settings.cache)
    url = keep(_registry(settings.home))
    show.step(f"registry: `plait serve` at {url}")
    client = keep(RegistryClient(url))
    fleet = Fleet(keep(_hosts(settings, base, url)), client)
    kind = "SGLang" if settings.sglang else "torch-module"
    show.step(f"two {kind} engines start from the base model (TP={settings.tp})")
    fleet.start_engines()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    return Scenario(settings, client, fleet, show, proofs, base, tokenizer)


@contextmanager
def _registry(home: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    log = home / "registry.log"
    child = Child(
        plait_command("serve", "--data", str(home / "registry"), "--port", str(port)), log=log
    )
    try:
        child.wait_until(lambda: "serving on" in log.read_text(), within_s=_REGISTRY_START_S)
        yield url
    finally:
        child.stop()


@contextmanager
def _hosts(settings: Settings, base: Path, url: str) -> Iterator[list[Host]]:
    hosts = [_host(name, settings, base, url) for name in _ENGINES]
    try:
        yield hosts
    finally:
        with ThreadPoolExecutor(len(hosts)) as pool:
            for stopped in [pool.submit(host.stop) for host in hosts]:
                stopped.result()


def _host(name: str, settings: Settings, base: Path, url: str) -> Host:
    home, environment = settings.home / name, {"PLAIT_URL": url}
    if settings.sglang:
        return SglangHost(
            name, model=base, policy=POLICY, home=home, environment=environment, tp=settings.tp
        )
    return ModuleHost(name, model=base, policy=POLICY, home=home, environment=environment)


def _summary(settings: Settings, show: Show, proofs: Proofs) -> dict[str, Any]:
    return {
        "passed": proofs.passed,
        "model": settings.model,
        "engine": "sglang" if settings.sglang else "torch-module",
        "tp": settings.tp,
        "learning_rate": settings.learning_rate,
        "seconds": round(show.seconds, 1),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "versions": [row.to_document() for row in show.rows],
        "proofs": [proof.to_document() for proof in proofs.all],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "")
