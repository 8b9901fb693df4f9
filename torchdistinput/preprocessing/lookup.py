"""``StringLookup`` and ``IntegerLookup``: values of a vocabulary as indices or vectors, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from torchdistinput.preprocessing.categories import salt_of
from torchdistinput.preprocessing.inputs import ints, nested, texts_of
from torchdistinput.preprocessing.layer import as_it_is
from torchdistinput.preprocessing.vocabulary import Settings, Vocabulary
from torchdistinput.sources.datasets.file_dataset import FileDataset
from torchdistinput.sources.formats.readers import text_lines
from torchdistinput.strategy import Strategy


def started(settings: Settings, vocabulary: Any, idf_weights: Any) -> Vocabulary | None:
    """The vocabulary that a constructor was given: a sequence, or the path of a file with one term in each line.

    Raises:
      ValueError: it does not fit; see ``Vocabulary.given``.
      TypeError: a term is of another type.
    """
    if vocabulary is None:
        if idf_weights is not None and settings.output_mode != "tf_idf":
            raise ValueError(f'{settings.layer}: idf_weights need output_mode="tf_idf".')
        return None
    if isinstance(vocabulary, str):
        vocabulary = [settings.kind(line) for line in FileDataset([vocabulary], text_lines)]
    tokens = vocabulary.tolist() if isinstance(vocabulary, Tensor | np.ndarray) else list(vocabulary)
    tokens = [int(each) if isinstance(each, np.integer) else each for each in tokens]
    special = set(settings.special_tokens)
    wrong = [each for each in tokens if type(each) is not settings.kind and each not in special]
    if wrong:
        raise TypeError(f"{settings.layer}: the vocabulary holds {wrong[0]!r:.60}; {settings.kind.__name__} is needed.")
    weights = idf_weights.tolist() if isinstance(idf_weights, Tensor | np.ndarray) else idf_weights
    return Vocabulary.given(settings, tokens, weights)


def rows_of_texts(batch: Any) -> list[Any]:
    """The documents of a batch: the rows of rank 2, the elements of rank 1.

    Raises:
      ValueError: the batch has more dims.
    """
    rows = [[each] if isinstance(each, str) else list(each) for each in batch]
    if any(not isinstance(each, str) for row in rows[:1] for each in row[:1]):
        raise ValueError('output_mode="tf_idf" learns from batches of rank 1 or 2: the rows are the documents.')
    return rows


def _rows_of_ints(batch: Any) -> list[Any]:
    values = np.asarray(batch)
    if values.ndim > 2:
        raise ValueError(
            f'output_mode="tf_idf" learns from batches of rank 1 or 2, not {values.ndim}: the rows are the documents.'
        )
    return [row.reshape(-1).tolist() for row in values]


class _Lookup(nn.Module):
    """The code shared by both lookup layers: a module with a vocabulary, which is given or learned, and saved."""

    def __init__(self, settings: Settings, vocabulary: Vocabulary | None) -> None:
        super().__init__()
        self.settings = settings
        self._vocabulary = vocabulary
        self._is_fixed = vocabulary is not None

    def learn(
        self,
        data: Any,
        rows_of: Callable[[Any], list[Any]],
        *,
        tokens_of: Callable[[Any], Any] | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        """Learns the vocabulary of data; see ``Vocabulary.learned``. Collective: every rank calls this.

        Raises:
          ValueError: the vocabulary was given.
        """
        if self._is_fixed:
            raise ValueError(f"{self.settings.layer}: the vocabulary was given; there is nothing to learn.")
        self._vocabulary = Vocabulary.learned(self.settings, data, tokens_of or rows_of, rows_of, strategy=strategy)

    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the layer.

        Raises:
          RuntimeError: the layer has learned nothing yet.
        """
        if self._vocabulary is None:
            raise RuntimeError(f"{self.settings.layer}: there is no vocabulary yet; call adapt(data), or give one.")
        return self._vocabulary

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[Any]:  # noqa: FBT001, FBT002 - as Keras
        """The tokens by index. Local."""
        if self._vocabulary is None:
            return list(self.settings.special_tokens) if include_special_tokens else []
        return self._vocabulary.tokens(include_special_tokens=include_special_tokens)

    def vocabulary_size(self) -> int:
        """How many tokens there are, with padding and special tokens. Local."""
        return len(self.settings.special_tokens) if self._vocabulary is None else self._vocabulary.depth

    def set_vocabulary(self, vocabulary: Sequence[Any], idf_weights: Sequence[float] | None = None) -> None:
        """Sets the tokens, with exactly the special tokens in front or without any. Local."""
        self._vocabulary = Vocabulary.given(self.settings, vocabulary, idf_weights)

    @property
    def idf_weights(self) -> Tensor | None:
        """With ``"tf_idf"``, the weight of each token, float32; 0 for padding."""
        return None if self._vocabulary is None else self._vocabulary.weights

    def get_extra_state(self) -> dict[str, Any]:
        """The learned vocabulary, for ``state_dict``."""
        weights = self.idf_weights
        terms = None if self._vocabulary is None else self._vocabulary.terms
        size = len(self.get_vocabulary())  # without padding
        return {"terms": terms, "idf_weights": None if weights is None else weights[:size].tolist()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes over a learned vocabulary, from ``load_state_dict``."""
        terms = state["terms"]
        self._vocabulary = None if terms is None else Vocabulary(self.settings, terms, state["idf_weights"])


@final
class StringLookup(_Lookup):
    """Strings as indices of a vocabulary or as vectors, as ``keras.layers.StringLookup``.

    >>> tdi.preprocessing.StringLookup(vocabulary=["cat", "dog"])(["dog", "cat", "cow"])
    tensor([2, 1, 0])

    Args:
      max_tokens: how many tokens there are at most, special ones too.
      num_oov_indices: indices for strings that are not in the vocabulary; several are chosen by a hash. With 0 such a
        string is an error.
      mask_token: the string with index 0 in ``"int"``, which counts for nothing in the other modes.
      oov_token: the token for strings that are not in the vocabulary, with ``invert`` and in ``get_vocabulary``.
      vocabulary: the terms, instead of ``adapt``: strings, or the path of a file (of any protocol of fsspec) with one
        in each line.
      idf_weights: of the vocabulary, with ``"tf_idf"``.
      invert: whether indices are mapped to strings.
      output_mode: "int", "one_hot", "multi_hot", "count" (int64) or "tf_idf" (float32).
      pad_to_max_tokens: whether vectors have ``max_tokens`` numbers, also where there are fewer tokens.
      sparse: must be false.
      encoding: "utf-8".
      oov_method: has no effect: strings are hashed.
      salt: the key of SipHash for several OOV indices; without it FarmHash is used, of the extra ``farmhash``.

    Raises:
      ValueError: arguments contradict each other, or the vocabulary does not fit.
    """

    def __init__(  # noqa: PLR0913 - as Keras
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: str | None = None,
        oov_token: str | None = "[UNK]",
        vocabulary: Any = None,
        idf_weights: Any = None,
        *,
        invert: bool = False,
        output_mode: str = "int",
        pad_to_max_tokens: bool = False,
        sparse: bool = False,
        encoding: str = "utf-8",
        oov_method: str = "farmhash",
        salt: int | Sequence[int] | None = None,
    ) -> None:
        if encoding.lower() not in ("utf-8", "utf8"):
            raise ValueError(f"StringLookup: encoding={encoding!r}; strings of Python are read as utf-8.")
        if oov_method not in ("floormod", "farmhash"):
            raise ValueError(f"StringLookup: oov_method={oov_method!r}; it must be 'floormod' or 'farmhash'.")
        settings = Settings(
            layer="StringLookup",
            kind=str,
            max_tokens=max_tokens,
            num_oov_indices=num_oov_indices,
            mask_token=mask_token,
            oov_token=oov_token,
            output_mode=output_mode,
            pad_to_max_tokens=pad_to_max_tokens,
            invert=invert,
            sparse=sparse,
            hashes=True,
            salt=salt_of("StringLookup", salt),
        )
        super().__init__(settings, started(settings, vocabulary, idf_weights))

    def adapt(self, data: Any, *, strategy: Strategy | None = None) -> None:
        """Learns the vocabulary, in place of an earlier one. Collective: every rank calls this.

        Args:
          data: see ``layer.learn_from``.
          strategy: the ranks; see ``analyze``.

        Raises:
          ValueError: the vocabulary was given.
          TypeError: the data holds no strings.
        """
        self.learn(data, rows_of_texts, tokens_of=as_it_is, strategy=strategy)

    def forward(self, inputs: Any) -> Any:
        """Indices or vectors, by the output mode; with ``invert`` nested lists of strings. Local.

        Args:
          inputs: a string, nested lists of strings; or, without Python's work for each string, an array of fixed width
            (``U``, or ``S`` in UTF-8), or an Arrow array, a dictionary too; with ``invert`` indices.

        Raises:
          RuntimeError: nothing was learned yet.
          ValueError: a string is not in the vocabulary, and ``num_oov_indices`` is 0; it is named.
          TypeError: the input is of another type.
        """
        vocabulary = self.vocabulary()
        if self.settings.invert:
            ids = ints(inputs, "StringLookup")
            return nested(vocabulary.values_at(ids), ids.shape)
        texts, shape = texts_of(inputs, "StringLookup")
        return vocabulary.output(vocabulary.ids_of_texts(texts).reshape(shape))


@final
class IntegerLookup(_Lookup):
    """Ints as indices of a vocabulary or as vectors, as ``keras.layers.IntegerLookup``. Runs on any device.

    >>> tdi.preprocessing.IntegerLookup(vocabulary=[10, 20])(torch.tensor([20, 10, 5]))
    tensor([2, 1, 0])

    Args:
      max_tokens: see ``StringLookup``.
      num_oov_indices: see there; several are chosen by the remainder of the int, or by its hash.
      mask_token: see there.
      oov_token: see there.
      vocabulary: see there; ints.
      vocabulary_dtype: "int64".
      idf_weights: see there.
      invert: see there.
      output_mode: see there.
      pad_to_max_tokens: see there.
      sparse: must be false.
      oov_method: "floormod", or "farmhash" for the hash of the decimal text.
      salt: the key of SipHash, with ``"farmhash"``.

    Raises:
      ValueError: arguments contradict each other, or the vocabulary does not fit.
    """

    def __init__(  # noqa: PLR0913 - as Keras
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: int | None = None,
        oov_token: int | None = -1,
        vocabulary: Any = None,
        vocabulary_dtype: str = "int64",
        idf_weights: Any = None,
        *,
        invert: bool = False,
        output_mode: str = "int",
        pad_to_max_tokens: bool = False,
        sparse: bool = False,
        oov_method: str = "floormod",
        salt: int | Sequence[int] | None = None,
    ) -> None:
        if vocabulary_dtype != "int64":
            raise ValueError(f"IntegerLookup: vocabulary_dtype={vocabulary_dtype!r}; it must be 'int64'.")
        if oov_method not in ("floormod", "farmhash"):
            raise ValueError(f"IntegerLookup: oov_method={oov_method!r}; it must be 'floormod' or 'farmhash'.")
        if salt is not None and oov_method != "farmhash":
            raise ValueError('IntegerLookup: salt needs oov_method="farmhash".')
        settings = Settings(
            layer="IntegerLookup",
            kind=int,
            max_tokens=max_tokens,
            num_oov_indices=num_oov_indices,
            mask_token=mask_token,
            oov_token=oov_token,
            output_mode=output_mode,
            pad_to_max_tokens=pad_to_max_tokens,
            invert=invert,
            sparse=sparse,
            hashes=oov_method == "farmhash",
            salt=salt_of("IntegerLookup", salt),
        )
        super().__init__(settings, started(settings, vocabulary, idf_weights))

    def adapt(self, data: Any, *, strategy: Strategy | None = None) -> None:
        """Learns the vocabulary; see ``StringLookup.adapt``. Collective: every rank calls this."""
        self.learn(data, _rows_of_ints, tokens_of=as_it_is, strategy=strategy)

    def forward(self, inputs: Any) -> Tensor:
        """Indices or vectors, by the output mode; with ``invert`` ints. Local.

        Raises:
          RuntimeError: nothing was learned yet.
          ValueError: an int is not in the vocabulary, and ``num_oov_indices`` is 0; it is named.
          TypeError: the input holds no ints.
        """
        vocabulary = self.vocabulary()
        values = ints(inputs, "IntegerLookup")
        if self.settings.invert:
            return torch.tensor(vocabulary.values_at(values), dtype=torch.int64, device=values.device).reshape(
                values.shape
            )
        return vocabulary.output(vocabulary.ids_of_ints(values))
