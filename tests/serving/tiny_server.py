"""A server with tiny random models, in a thread of this process or in a process of its own."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from factories import PATIENCE, TINY

from config import Config
from extensions.http_server import listen
from extensions.inference.text import LanguageModel
from extensions.serving.app import ServeOptions, make_app
from model import Transformer
from tokenizer import load_tokenizer

CONTEXT = 2000


class EndlessModel(LanguageModel):
    """A model whose answers are ended by nothing but their length."""

    def text_prompt(self, text, **options):
        return super().text_prompt(text, **options)._replace(stop_ids=frozenset())

    def chat_prompt(self, messages, options=None):
        return super().chat_prompt(messages, options)._replace(stop_ids=frozenset())


def tiny_model(tokenizer_path: Path, name: str = "tiny", seed: int = 1, context: int = CONTEXT) -> LanguageModel:
    """A random model; its layers weigh enough that it does not repeat the token that it reads."""
    tokenizer = load_tokenizer(str(tokenizer_path))
    model = Transformer(Config(**{key.lower(): value for key, value in TINY.items()}), 512)
    model.init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter *= 10
    return EndlessModel(name, model.eval(), tokenizer, context)


@contextlib.contextmanager
def serving(models: list[LanguageModel], send_buffer: int = 0, **options) -> Iterator[tuple[str, list]]:
    """A server in a thread; yields its URL and its batchers.

    Args:
        send_buffer: the bytes that the system takes of an answer that its client does not read; 0 = its default.
    """
    from extensions.serving.app import Server

    app = make_app(models, ServeOptions(**options))
    with listen("127.0.0.1", 0) as listening:
        if send_buffer:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        server = Server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", app.state.batchers
        server.should_exit = True
        thread.join()
    for batcher in app.state.batchers:
        batcher._thread.join(PATIENCE)
        assert not batcher._thread.is_alive()


def is_free(batcher) -> bool:
    return not batcher._answers and not batcher._streams and batcher._inbox.empty() and batcher._engine.idle
