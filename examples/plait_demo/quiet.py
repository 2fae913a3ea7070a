"""Keeps the libraries' own chatter out of what the demo shows."""

import logging
import os


def quiet_libraries() -> None:
    """No progress bars, no news, no look-ups on the net: the models are on this disk."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Reading GGUF draws a bar of its own, whatever transformers has been told.
    os.environ["TQDM_DISABLE"] = "1"
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("plait").setLevel(logging.WARNING)
