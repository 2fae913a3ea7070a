"""An engine without SGLang: a torch module in a process, moved in place by its own follower.

It answers the few of SGLang's paths that the demo asks: POST /generate, POST /flush_cache, GET
/model_info, GET /health. This is also how any other engine is joined to plait: sample inside
`engine.generating()`, and let a Follower drive the engine.
"""

import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from plait_client.cache import ChunkCache
from plait_client.fetch import Fetcher
from plait_client.registry import RegistryClient
from plait_rollout import DeltaSource, Follower, InPlaceReplica, TorchModuleEngine


class Generator:
    """Samples from a causal language model between two moves of its weights."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._model.eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._one_at_a_time = Lock()
        self.engine = TorchModuleEngine(self._model)

    def generate(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """SGLang's `/generate` for one prompt: a row for each answer."""
        parameters = request["sampling_params"]
        temperature = float(parameters.get("temperature", 1.0))
        prompt = torch.tensor([request["input_ids"]])
        with self._one_at_a_time, self.engine.generating() as stamp, torch.no_grad():
            found = self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=temperature > 0,
                num_return_sequences=int(parameters.get("n", 1)),
                max_new_tokens=int(parameters["max_new_tokens"]),
                return_dict_in_generate=True,
                output_logits=True,
            )
        # Step by step, each of all rows: [tokens, rows, vocabulary].
        scores = torch.stack(found.logits).float().log_softmax(-1)
        answers = found.sequences[:, prompt.shape[1] :]
        return [self._row(ids, scores[:, row], stamp) for row, ids in enumerate(answers)]

    def _row(self, ids: torch.Tensor, scores: torch.Tensor, stamp: str) -> dict[str, Any]:
        end = self._tokenizer.eos_token_id
        tokens = ids.tolist()
        finished = end in tokens
        tokens = tokens[: tokens.index(end) + 1] if finished else tokens
        logprobs = [[float(scores[at, token]), token, None] for at, token in enumerate(tokens)]
        return {
            "text": self._tokenizer.decode(tokens, skip_special_tokens=True),
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": "stop" if finished else "length"},
                "weight_version": stamp,
                "output_token_logprobs": logprobs,
            },
        }


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/model_info":
            self._send({"weight_version": self.server.generator.engine.version()})
        else:
            self._send({"ok": self.path == "/health"}, 200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/generate":
            self._send(self.server.generator.generate(json.loads(body)))
        else:
            # No prompt cache is kept between requests.
            self._send({}, 200 if self.path == "/flush_cache" else 404)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Quiet: requests aren't news."""

    def _send(self, document: Any, status: int = 200) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, generator: Generator) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.generator = generator


def main() -> None:
    """Serves, and follows the policy's main channel, until the process is ended: what it holds is
    in memory only, so there is nothing to put in order.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = Generator(options.model)
    with RegistryClient(os.environ["PLAIT_URL"]) as client:
        fetcher = Fetcher(client, ChunkCache())
        replica = InPlaceReplica(generator.engine, DeltaSource(fetcher))
        follower = Follower(fetcher, replica, policy=options.policy, name=options.name)
        with _Server(options.port, generator) as server:
            follower.start()
            server.serve_forever()


if __name__ == "__main__":
    main()
