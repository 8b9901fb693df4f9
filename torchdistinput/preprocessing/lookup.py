"""``StringLookup`` and ``IntegerLookup``: values of a vocabulary as indices or vectors, and back.

Special tokens stand in front of a vocabulary: the mask, if there is one and the output is ids, then the token for
out-of-vocabulary values, if they have an index. Terms follow, the most frequent first, of equally frequent ones the
larger first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from torchdistinput.preprocessing.inputs import ints, nested, strings
from torchdistinput.preprocessing.layer import as_it_is, as_vectors, check_mode, learn_from
from torchdistinput.sources.datasets.fragment_dataset import FileDataset
from torchdistinput.sources.formats.readers import text_lines
from torchdistinput.statistics import Counts
from torchdistinput.strategy import Strategy

_UNCOUNTED: Final = -1  # the index of masks in vectors
_NOWHERE: Final = -2  # the index of values that have none


class _Lookup(nn.Module):
    """The code shared by both lookup layers: a module with a vocabulary, which is given or learned, and saved.

    Args:
      kind: the type of the values. For the others see ``StringLookup``.
    """

    def __init__(  # noqa: PLR0913 - as Keras
        self,
        kind: type[str | int],
        *,
        max_tokens: int | None,
        num_oov_indices: int,
        mask_token: Any,
        oov_token: Any,
        vocabulary: Any,
        invert: bool,
        output_mode: str,
        pad_to_max_tokens: bool,
    ) -> None:
        super().__init__()
        self._layer, self._kind = type(self).__name__, kind
        self.max_tokens, self.num_oov_indices = max_tokens, num_oov_indices
        self.mask_token, self.oov_token = mask_token, oov_token
        self.invert, self.output_mode, self.pad_to_max_tokens = invert, output_mode, pad_to_max_tokens
        self._check()
        self._is_fixed = vocabulary is not None
        self._take(None)
        if self._is_fixed:
            self.set_vocabulary(vocabulary)

    def _check(self) -> None:
        """Refuses arguments that contradict each other."""
        layer, special = self._layer, len(self._special_tokens)
        check_mode(layer, self.output_mode)
        if self.num_oov_indices not in (0, 1):
            raise ValueError(
                f"{layer}: num_oov_indices={self.num_oov_indices}; it must be 0 or 1. For several, put a hash of the "
                "values that are not in the vocabulary in front, such as zlib.crc32(text.encode()) % n."
            )
        if self.max_tokens is not None and self.max_tokens <= 1:
            raise ValueError(f"{layer}: max_tokens={self.max_tokens}; it must be more than 1.")
        if self.max_tokens is not None and self.max_tokens < special:
            raise ValueError(f"{layer}: max_tokens={self.max_tokens}; there are {special} special tokens.")
        if self.pad_to_max_tokens and self.max_tokens is None:
            raise ValueError(f"{layer}: pad_to_max_tokens needs max_tokens.")
        if self.invert and self.output_mode != "int":
            raise ValueError(f'{layer}: invert needs output_mode="int", not {self.output_mode!r}.')
        if self.invert and self.oov_token is None:
            raise ValueError(f"{layer}: invert needs an oov_token, for ids that are out of range.")

    @property
    def _has_mask(self) -> bool:
        """Whether index 0 is the mask's."""
        return self.mask_token is not None and self.output_mode == "int"

    @property
    def _special_tokens(self) -> list[Any]:
        """The tokens in front of the terms."""
        return [self.mask_token] * self._has_mask + [self.oov_token] * self.num_oov_indices

    def adapt(self, data: Any, *, strategy: Strategy | None = None) -> None:
        """Learns the vocabulary, in place of an earlier one. Collective: every rank calls this.

        Args:
          data: see ``layer.learn_from``.
          strategy: the ranks; see ``analyze``.

        Raises:
          ValueError: the vocabulary was given.
          TypeError: the data holds values of another type.
        """
        if self._is_fixed:
            raise ValueError(f"{self._layer}: the vocabulary was given; there is nothing to learn.")
        spec = {"found": (as_it_is, Counts())}
        counted = learn_from(data, spec, of_texts=self._kind is str, strategy=strategy)["found"]
        special = {self.mask_token, self.oov_token}
        terms = [term for term in counted.values if term not in special]
        wrong = [term for term in terms[:1] if not isinstance(term, self._kind)]  # all have one type
        if wrong:
            raise TypeError(f"{self._layer}: the data holds {wrong[0]!r:.60}; {self._kind.__name__} is needed.")
        if self.max_tokens is not None:
            terms = terms[: self.max_tokens - len(self._special_tokens)]
        self._take(terms)

    def set_vocabulary(self, vocabulary: Any) -> None:
        """Sets the tokens, with exactly the special tokens in front or without any. Local.

        Args:
          vocabulary: a sequence, or the path of a file with one term in each line.

        Raises:
          ValueError: it is empty, too long, or has a term twice or a special token among the terms.
          TypeError: a term is of another type.
        """
        if isinstance(vocabulary, str):
            vocabulary = [self._kind(line) for line in FileDataset([vocabulary], text_lines)]
        tokens = vocabulary.tolist() if isinstance(vocabulary, Tensor | np.ndarray) else list(vocabulary)
        tokens = [int(each) if isinstance(each, np.integer) else each for each in tokens]
        special = self._special_tokens
        wrong = [each for each in tokens if not isinstance(each, self._kind) and each not in special]
        if wrong:
            raise TypeError(f"{self._layer}: the vocabulary holds {wrong[0]!r:.60}; {self._kind.__name__} is needed.")
        if not tokens:
            raise ValueError(f"{self._layer}: the vocabulary is empty.")
        has_special = bool(special) and tokens[: len(special)] == special
        self._take(tokens[len(special) :] if has_special else tokens)

    def _take(self, terms: Sequence[Any] | None) -> None:
        """Takes over the terms, without special tokens; ``None`` for none yet."""
        self._terms = None if terms is None else list(terms)
        self._places: dict[Any, int] = {}
        if self._terms is None:
            return
        first = len(self._special_tokens)
        places = {term: place for place, term in enumerate(self._terms, first)}
        if len(places) < len(self._terms):
            twice, _ = Counter(self._terms).most_common(1)[0]
            raise ValueError(f"{self._layer}: the vocabulary has the term {twice!r} more than once.")
        if self.mask_token is not None and self.mask_token in places:
            raise ValueError(
                f"{self._layer}: the mask token {self.mask_token!r} is term {places[self.mask_token] - first} of the "
                f"vocabulary. Give it without special tokens, or with exactly {self._special_tokens!r:.80} in front."
            )
        if self.invert and self.oov_token in places:
            raise ValueError(
                f"{self._layer}: the OOV token {self.oov_token!r} is term {places[self.oov_token] - first} of the "
                "vocabulary; with invert it must be in front, or left out."
            )
        size = first + len(places)
        if self.max_tokens is not None and size > self.max_tokens:
            raise ValueError(
                f"{self._layer}: {size} tokens, special ones too, are more than max_tokens={self.max_tokens}."
            )
        if self.mask_token is not None:
            places[self.mask_token] = 0 if self._has_mask else _UNCOUNTED
        self._places = places
        if self._kind is int:
            self._sorted = torch.tensor(sorted(places), dtype=torch.int64)
            self._sorted_places = torch.tensor([places[each] for each in sorted(places)], dtype=torch.int64)

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[Any]:  # noqa: FBT001, FBT002 - as Keras
        """The tokens by index. Local."""
        return [*(self._special_tokens if include_special_tokens else []), *(self._terms or [])]

    def vocabulary_size(self) -> int:
        """How many tokens there are, with padding and special tokens. Local."""
        size = len(self._special_tokens) + len(self._terms or [])
        return self.max_tokens if self.pad_to_max_tokens and self.max_tokens and self._terms is not None else size

    def _learned(self) -> dict[Any, int]:
        """The index of each term, and of the mask.

        Raises:
          RuntimeError: the layer has learned nothing yet.
        """
        if self._terms is None:
            raise RuntimeError(f"{self._layer}: there is no vocabulary yet; call adapt(data), or give one.")
        return self._places

    @property
    def _outside(self) -> int:
        """The index of values that are not in the vocabulary."""
        return int(self._has_mask) if self.num_oov_indices else _NOWHERE

    def _output(self, ids: Tensor) -> Tensor:
        """Indices in the output mode of the layer, int64."""
        if self.output_mode == "int":
            return ids
        return as_vectors(ids, self.output_mode, self.vocabulary_size(), dtype=torch.int64)

    def _refused(self, example: Any, number: int) -> ValueError:
        return ValueError(
            f"{self._layer}: {example!r:.60} is not in the vocabulary, nor are {number - 1} others, and "
            "num_oov_indices is 0. With num_oov_indices=1 they get an index of their own."
        )

    def _values_at(self, ids: Tensor) -> list[Any]:
        """The tokens at indices; the OOV token where there is none."""
        self._learned()
        tokens = self.get_vocabulary()
        return [tokens[each] if 0 <= each < len(tokens) else self.oov_token for each in ids.reshape(-1).tolist()]

    def get_extra_state(self) -> dict[str, Any]:
        """The learned vocabulary, for ``state_dict``."""
        return {"terms": self._terms}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes over a learned vocabulary, from ``load_state_dict``."""
        self._take(state["terms"])


@final
class StringLookup(_Lookup):
    """Strings as indices of a vocabulary or as vectors, as ``keras.layers.StringLookup``.

    >>> tdi.preprocessing.StringLookup(vocabulary=["cat", "dog"])(["dog", "cat", "cow"])
    tensor([2, 1, 0])

    Args:
      max_tokens: how many tokens there are at most, special ones too.
      num_oov_indices: 1 for an index of the strings that are not in the vocabulary; with 0 such a string is an error.
      mask_token: the string with index 0 in ``"int"``, which counts for nothing in the other modes.
      oov_token: the token for strings that are not in the vocabulary, with ``invert`` and in ``get_vocabulary``.
      vocabulary: the terms, instead of ``adapt``: strings, or the path of a file (of any protocol of fsspec) with one
        in each line.
      invert: whether indices are mapped to strings.
      output_mode: "int", "one_hot", "multi_hot" or "count" (int64).
      pad_to_max_tokens: whether vectors have ``max_tokens`` numbers, also where there are fewer tokens.

    Raises:
      ValueError: arguments contradict each other, or the vocabulary does not fit.
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: str | None = None,
        oov_token: str | None = "[UNK]",
        vocabulary: Any = None,
        *,
        invert: bool = False,
        output_mode: str = "int",
        pad_to_max_tokens: bool = False,
    ) -> None:
        super().__init__(
            str,
            max_tokens=max_tokens,
            num_oov_indices=num_oov_indices,
            mask_token=mask_token,
            oov_token=oov_token,
            vocabulary=vocabulary,
            invert=invert,
            output_mode=output_mode,
            pad_to_max_tokens=pad_to_max_tokens,
        )

    def forward(self, inputs: Any) -> Any:
        """Indices or vectors, by the output mode; with ``invert`` nested lists of strings. Local.

        Args:
          inputs: a string, nested lists or an array of strings (also of bytes in UTF-8); with ``invert`` indices.

        Raises:
          RuntimeError: nothing was learned yet.
          ValueError: a string is not in the vocabulary, and ``num_oov_indices`` is 0; it is named.
          TypeError: the input is of another type.
        """
        places = self._learned()
        if self.invert:
            ids = ints(inputs, self._layer)
            return nested(self._values_at(ids), ids.shape)
        flat, shape = strings(inputs, self._layer)
        found = np.fromiter(map(places.get, flat, repeat(self._outside)), np.int64, len(flat))
        missing = np.flatnonzero(found == _NOWHERE)
        if len(missing):
            raise self._refused(flat[missing[0]], len(missing))
        return self._output(torch.from_numpy(found).reshape(shape))


@final
class IntegerLookup(_Lookup):
    """Ints as indices of a vocabulary or as vectors, as ``keras.layers.IntegerLookup``. Runs on any device.

    >>> tdi.preprocessing.IntegerLookup(vocabulary=[10, 20])(torch.tensor([20, 10, 5]))
    tensor([2, 1, 0])

    Args:
      max_tokens: see ``StringLookup``, also for the arguments below.
      num_oov_indices: 1 for an index of the ints that are not in the vocabulary; with 0 such an int is an error.
      mask_token: the int with index 0 in ``"int"``, which counts for nothing in the other modes.
      oov_token: the token for ints that are not in the vocabulary.
      vocabulary: ints, or the path of a file with one in each line.
      invert: whether indices are mapped to ints.
      output_mode: "int", "one_hot", "multi_hot" or "count" (int64).
      pad_to_max_tokens: whether vectors have ``max_tokens`` numbers.

    Raises:
      ValueError: arguments contradict each other, or the vocabulary does not fit.
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: int | None = None,
        oov_token: int | None = -1,
        vocabulary: Any = None,
        *,
        invert: bool = False,
        output_mode: str = "int",
        pad_to_max_tokens: bool = False,
    ) -> None:
        super().__init__(
            int,
            max_tokens=max_tokens,
            num_oov_indices=num_oov_indices,
            mask_token=mask_token,
            oov_token=oov_token,
            vocabulary=vocabulary,
            invert=invert,
            output_mode=output_mode,
            pad_to_max_tokens=pad_to_max_tokens,
        )

    def forward(self, inputs: Any) -> Tensor:
        """Indices or vectors, by the output mode; with ``invert`` ints. Local.

        Raises:
          RuntimeError: nothing was learned yet.
          ValueError: an int is not in the vocabulary, and ``num_oov_indices`` is 0; it is named.
          TypeError: the input holds no ints.
        """
        places = self._learned()
        values = ints(inputs, self._layer)
        if self.invert:
            return torch.tensor(self._values_at(values), device=values.device).reshape(values.shape).to(torch.int64)
        if places:
            terms, at = self._sorted.to(values.device), self._sorted_places.to(values.device)
            place = torch.searchsorted(terms, values).clamp_max(len(terms) - 1)
            found = torch.where(terms[place] == values, at[place], self._outside)
        else:
            found = torch.full_like(values, self._outside)
        missing = values[found == _NOWHERE]
        if len(missing):
            raise self._refused(int(missing[0]), len(missing))
        return self._output(found)
