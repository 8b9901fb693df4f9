"""A vocabulary: its special tokens, how it is learned, and how values are looked up. Shared by all lookup layers.

Special tokens stand in front: the mask, if there is one and the output is ids, then ``num_oov_indices`` times the token
for out-of-vocabulary values. Terms follow, the most frequent first, of equally frequent ones the larger first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchdistinput.preprocessing.hashes import buckets
from torchdistinput.preprocessing.inputs import Texts, listed, taken
from torchdistinput.preprocessing.layer import OUTPUT_MODES, as_vectors, check_mode, learn_from
from torchdistinput.preprocessing.string_table import NOWHERE, StringTable
from torchdistinput.statistics import Counts, CountsResult, State, Statistic
from torchdistinput.strategy import Strategy

_UNCOUNTED: Final = -1  # the index of masks in vectors


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a lookup layer; see ``StringLookup``.

    Args:
      layer: its name, for messages.
      kind: the type of its values.
      hashes: whether several OOV indices are chosen by a hash; else by the remainder of the value.

    Raises:
      ValueError: arguments contradict each other.
    """

    layer: str
    kind: type[str | int]
    max_tokens: int | None
    num_oov_indices: int
    mask_token: Any
    oov_token: Any
    output_mode: str
    pad_to_max_tokens: bool
    invert: bool
    sparse: bool
    hashes: bool
    salt: tuple[int, int] | None

    def __post_init__(self) -> None:
        check_mode(self.layer, self.output_mode, allowed=OUTPUT_MODES, sparse=self.sparse)
        if self.num_oov_indices < 0:
            raise ValueError(f"{self.layer}: num_oov_indices={self.num_oov_indices}; it must be 0 or more.")
        if self.max_tokens is not None and self.max_tokens <= 1:
            raise ValueError(f"{self.layer}: max_tokens={self.max_tokens}; it must be more than 1.")
        if self.max_tokens is not None and self.max_tokens < len(self.special_tokens):
            raise ValueError(
                f"{self.layer}: max_tokens={self.max_tokens}; there are {len(self.special_tokens)} special tokens."
            )
        if self.pad_to_max_tokens and self.max_tokens is None:
            raise ValueError(f"{self.layer}: pad_to_max_tokens needs max_tokens.")
        if self.invert and self.output_mode != "int":
            raise ValueError(f'{self.layer}: invert needs output_mode="int", not {self.output_mode!r}.')
        if self.invert and self.oov_token is None:
            raise ValueError(f"{self.layer}: invert needs an oov_token, for ids that are out of range.")

    @property
    def has_mask(self) -> bool:
        """Whether index 0 is the mask's."""
        return self.mask_token is not None and self.output_mode == "int"

    @property
    def special_tokens(self) -> list[Any]:
        """The tokens in front of the terms."""
        return [self.mask_token] * self.has_mask + [self.oov_token] * self.num_oov_indices


@final
@dataclass(frozen=True)
class _DocumentsResult:
    """The result of ``_Documents``.

    Args:
      tokens: how often each token occurs.
      documents: in how many documents each token occurs.
      number: how many documents there are.
    """

    tokens: CountsResult
    documents: CountsResult
    number: int


@final
@dataclass(frozen=True)
class _Documents(Statistic):
    """Counts of tokens, and of the documents that they are in; a batch is a list of documents, which are lists."""

    def start(self) -> State:
        return {"tokens": Counts().start(), "documents": Counts().start(), "number": 0}

    def update(self, state: State, batch: Any) -> State:
        tokens = Counts().update(state["tokens"], batch)
        documents = Counts().update(state["documents"], [list(set(document)) for document in batch])
        return {"tokens": tokens, "documents": documents, "number": state["number"] + len(batch)}

    def merge(self, state: State, other: State) -> State:
        both = {name: Counts().merge(state[name], other[name]) for name in ("tokens", "documents")}
        return {**both, "number": state["number"] + other["number"]}

    def result(self, state: State) -> _DocumentsResult:
        return _DocumentsResult(Counts().result(state["tokens"]), Counts().result(state["documents"]), state["number"])


@final
class Vocabulary:
    """The terms of a lookup layer, and their weights.

    Args:
      settings: the arguments of the layer.
      terms: the terms in their order, without special tokens.
      idf_weights: with ``"tf_idf"``, one for each special token and term.

    Raises:
      ValueError: a term comes twice, or is a special token where it may not be; too many terms.
    """

    def __init__(self, settings: Settings, terms: Sequence[Any], idf_weights: Sequence[float] | None) -> None:
        self.settings, self.terms = settings, list(terms)
        layer, first = settings.layer, len(settings.special_tokens)
        if len(set(self.terms)) < len(self.terms):
            twice = next(term for term, number in Counter(self.terms).items() if number > 1)
            raise ValueError(f"{layer}: the vocabulary has the term {twice!r} more than once.")
        if settings.mask_token is not None and settings.mask_token in self.terms:
            place = self.terms.index(settings.mask_token)
            raise ValueError(
                f"{layer}: the mask token {settings.mask_token!r} is term {place} of the vocabulary. Give it "
                f"without special tokens, or with exactly {settings.special_tokens!r:.80} in front."
            )
        if settings.invert and settings.oov_token in self.terms:
            raise ValueError(
                f"{layer}: the OOV token {settings.oov_token!r} is term {self.terms.index(settings.oov_token)} of the "
                "vocabulary; with invert it must be in front, or left out."
            )
        size = first + len(self.terms)
        if settings.max_tokens is not None and size > settings.max_tokens:
            raise ValueError(
                f"{layer}: {size} tokens, special ones too, are more than max_tokens={settings.max_tokens}."
            )
        self.depth = settings.max_tokens if settings.pad_to_max_tokens and settings.max_tokens else size
        self.weights: Tensor | None = None
        if idf_weights is not None:
            padded = [*idf_weights, *[0.0] * (self.depth - size)]
            self.weights = torch.tensor(padded, dtype=torch.float32)
        self._places = {term: place for place, term in enumerate(self.terms, first)}
        ordered = sorted(self.terms) if self.terms and isinstance(self.terms[0], int) else []
        self._sorted = torch.tensor(ordered, dtype=torch.int64)
        self._sorted_places = torch.tensor([self._places[term] for term in ordered], dtype=torch.int64)

    @classmethod
    def given(cls, settings: Settings, tokens: Sequence[Any], idf_weights: Sequence[float] | None) -> Vocabulary:
        """The vocabulary that a user gives: with exactly the special tokens in front, or with none.

        Raises:
          ValueError: it is empty, or weights are missing, too many, or not wanted.
        """
        tokens, special = list(tokens), settings.special_tokens
        if not tokens:
            raise ValueError(f"{settings.layer}: the vocabulary is empty.")
        weighs = settings.output_mode == "tf_idf"
        if weighs and idf_weights is None:
            raise ValueError(f'{settings.layer}: a vocabulary with output_mode="tf_idf" needs idf_weights.')
        if not weighs and idf_weights is not None:
            raise ValueError(f'{settings.layer}: idf_weights need output_mode="tf_idf".')
        if idf_weights is not None and len(idf_weights) != len(tokens):
            raise ValueError(f"{settings.layer}: {len(idf_weights)} idf_weights for {len(tokens)} tokens.")
        has_special = bool(special) and tokens[: len(special)] == special
        terms = tokens[len(special) :] if has_special else tokens
        if idf_weights is not None and not has_special:
            idf_weights = [float(np.mean(idf_weights))] * len(special) + list(idf_weights)
        return cls(settings, terms, idf_weights)

    @classmethod
    def learned(
        cls,
        settings: Settings,
        data: Any,
        tokens_of: Callable[[Any], Any],
        rows_of: Callable[[Any], list[Any]],
        *,
        strategy: Strategy | None = None,
    ) -> Vocabulary:
        """The vocabulary of data. Collective: every rank calls this.

        Args:
          settings: the arguments of the layer.
          data: see ``layer.learn_from``.
          tokens_of: the tokens of a batch, as ``Counts`` takes them.
          rows_of: the tokens of each document of a batch.
          strategy: the ranks.
        """
        weighs = settings.output_mode == "tf_idf"
        spec = {"found": (rows_of, _Documents()) if weighs else (tokens_of, Counts())}
        found = learn_from(data, spec, of_texts=settings.kind is str, strategy=strategy)["found"]
        counted = found.tokens if weighs else found
        special = {settings.mask_token, settings.oov_token}
        terms = [term for term in counted.values if term not in special]
        wrong = [term for term in terms[:1] if not isinstance(term, settings.kind)]  # all have one type
        if wrong:
            raise TypeError(f"{settings.layer}: the data holds {wrong[0]!r:.60}; {settings.kind.__name__} is needed.")
        if settings.max_tokens is not None:
            terms = terms[: settings.max_tokens - len(settings.special_tokens)]
        if not weighs:
            return cls(settings, terms, None)
        inside = dict(zip(found.documents.values, found.documents.counts, strict=True))
        weights = [math.log(1 + found.number / (1 + inside[term])) for term in terms]
        average = math.fsum(weights) / len(weights) if weights else 0.0
        return cls(settings, terms, [average] * len(settings.special_tokens) + weights)

    def tokens(self, *, include_special_tokens: bool = True) -> list[Any]:
        """The tokens by index."""
        return [*self.settings.special_tokens, *self.terms] if include_special_tokens else list(self.terms)

    def ids_of_texts(self, texts: Texts) -> Tensor:
        """The index of each text, int64; -1 for masks in vector modes.

        Raises:
          TypeError: an entry of a list is no string.
          ValueError: a text is not in the vocabulary, and ``num_oov_indices`` is 0.
        """
        table = self._table
        try:
            found = table.find(texts)
        except TypeError as error:
            raise TypeError(f"{self.settings.layer}: {error}; strings are needed, or lists of them.") from error
        outside = found == NOWHERE
        if outside.any():
            np.place(found, outside, self._outside(texts, outside))
        return torch.from_numpy(found)

    def _outside(self, texts: Texts, outside: npt.NDArray[np.bool_]) -> Any:
        """The indices of the texts that are neither terms nor the mask: by their hash, if there are several."""
        number, start = self.settings.num_oov_indices, int(self.settings.has_mask)
        if number == 1:
            return start
        others = listed(taken(texts, np.flatnonzero(outside)))
        self._refuse_others(others[0], len(others))
        return start + buckets(others, number, self.settings.salt)

    @cached_property
    def _table(self) -> StringTable:
        mask = self.settings.mask_token
        masks = {mask: 0 if self.settings.has_mask else _UNCOUNTED} if isinstance(mask, str) else {}
        return StringTable({**self._places, **masks})

    def _refuse_others(self, example: Any, number: int) -> None:
        if not self.settings.num_oov_indices:
            raise ValueError(
                f"{self.settings.layer}: {example!r:.60} is not in the vocabulary, nor are {number - 1} others, and "
                "num_oov_indices is 0. With num_oov_indices=1 they get an index of their own."
            )

    def ids_of_ints(self, values: Tensor) -> Tensor:
        """The index of each int, int64, on the device of the values; -1 for masks in vector modes.

        Raises:
          ValueError: an int is not in the vocabulary, and ``num_oov_indices`` is 0.
        """
        settings = self.settings
        start = int(settings.has_mask)
        terms, places = self._sorted.to(values.device), self._sorted_places.to(values.device)
        if len(terms):
            place = torch.searchsorted(terms, values).clamp_max(len(terms) - 1)
            inside = terms[place] == values
            found = places[place]
        else:
            inside, found = torch.zeros_like(values, dtype=torch.bool), torch.zeros_like(values)
        outside = ~inside
        if settings.mask_token is not None:
            masks = values == settings.mask_token
            found = torch.where(masks, 0 if settings.has_mask else _UNCOUNTED, found)
            outside &= ~masks
        if bool(outside.any()):
            self._refuse_others(int(values[outside][0]), int(outside.sum()))
            found = torch.where(outside, start + self._oov_of_ints(values), found)
        return found

    def _oov_of_ints(self, values: Tensor) -> Tensor:
        number = self.settings.num_oov_indices
        if number == 1 or not self.settings.hashes:
            return torch.remainder(values, number)
        hashed = buckets([str(each) for each in values.reshape(-1).tolist()], number, self.settings.salt)
        return torch.from_numpy(hashed).reshape(values.shape).to(values.device)

    def output(self, ids: Tensor) -> Tensor:
        """Indices in the output mode of the layer: int64, float32 for ``"tf_idf"``."""
        mode = self.settings.output_mode
        if mode == "int":
            return ids
        if mode == "tf_idf" and self.weights is not None:
            return as_vectors(ids, "count", self.depth, dtype=torch.float32) * self.weights.to(ids.device)
        return as_vectors(ids, mode, self.depth, dtype=torch.int64)

    def values_at(self, ids: Tensor) -> list[Any]:
        """The tokens at indices; the OOV token where there is none."""
        tokens = self.tokens()
        return [
            tokens[each] if 0 <= each < len(tokens) else self.settings.oov_token for each in ids.reshape(-1).tolist()
        ]
