"""Answers in JSON: the tokens that may follow, by llguidance, an optional package."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from common.errors import DataError
from inference.text import LanguageModel

SPACE = r"[\x20\x0A\x0D\x09]{1,20}"  # without a bound, a model may write spaces to the end


class JsonGrammar:
    """The state of one answer that must match a JSON schema. `fork` gives one to each answer."""

    def __init__(self, model: LanguageModel, schema: Mapping[str, Any]):
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise DataError("answers in JSON need the package llguidance, which is not installed; run: "
                            "pip install -r requirements-extras.txt") from error
        if model.grammar_tokenizer is None:
            document, stop_ids = model.tokenizer.tokenizer_json, sorted(model.chat_format.stop_ids)
            try:
                model.grammar_tokenizer = LLTokenizer(document, model.model.vocab_size, stop_ids)
            except Exception as error:  # the library raises several classes
                raise DataError(f"llguidance cannot read this model's tokenizer: {error}") from error
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema),
                                                     overrides={"whitespace_pattern": SPACE})
        self._matcher = LLMatcher(model.grammar_tokenizer, grammar)
        if self._matcher.is_error():
            raise DataError(f"the schema cannot be used: {self._matcher.get_error()}")

    def fork(self) -> "JsonGrammar":
        copy = object.__new__(JsonGrammar)
        copy._matcher = self._matcher.deep_copy()
        return copy

    def allowed(self) -> Tensor:
        """Return (V,), true for the tokens that may come next; stop tokens where the JSON may end."""
        return torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.bool)

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
