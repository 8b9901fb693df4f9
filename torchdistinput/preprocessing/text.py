"""``TextVectorization``: turns texts into indices or vectors. It standardises, splits, joins n-grams, and looks up."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from torchdistinput.preprocessing.inputs import strings
from torchdistinput.preprocessing.layer import OUTPUT_MODES, check_mode
from torchdistinput.preprocessing.lookup import StringLookup
from torchdistinput.strategy import Strategy

# Only ASCII changes, as in Keras.
_LOWER: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_STANDARDIZE: Final[dict[Any, list[Any]]] = {
    None: [],
    "lower": [_LOWER],
    "strip_punctuation": [_NO_PUNCTUATION],
    "lower_and_strip_punctuation": [_LOWER, _NO_PUNCTUATION],
}
_BLANKS: Final = str.maketrans(dict.fromkeys("\t\n\v\f\r", " "))


def _words(text: str) -> list[str]:
    return [word for word in text.translate(_BLANKS).split(" ") if word]


_SPLIT: Final[dict[str, Callable[[str], list[str]]]] = {"whitespace": _words, "character": list}


@final
class TextVectorization(nn.Module):
    """Turns texts into indices of tokens or into vectors, as ``keras.layers.TextVectorization``.

    >>> tdi.preprocessing.TextVectorization(vocabulary=["the", "cat"])(["The cat!", "a cat sat"])
    tensor([[2, 3, 0],
            [1, 3, 1]])

    Args:
      max_tokens: the most tokens, special tokens included.
      standardize: ``None``, "lower", "strip_punctuation", "lower_and_strip_punctuation" (of ASCII only), or a function
        of a text.
      split: ``None``, "whitespace", "character" (code points), or a function from a text to a list of tokens.
      ngrams: ``None``; ``n`` for runs of 1 to ``n`` tokens; or the widths of runs.
      output_mode: "int" (int64, padded with 0 to the longest row), "one_hot" (a vector for each token), "multi_hot",
        "count" (int64) or "tf_idf" (float32).
      output_sequence_length: with ``"int"``, the length of all rows.
      pad_to_max_tokens: see ``StringLookup``.
      vocabulary: see ``StringLookup``.
      idf_weights: see ``StringLookup``.
      sparse: must be false.
      ragged: must be false.
      encoding: "utf-8".

    Raises:
      ValueError: arguments contradict each other, or the vocabulary does not fit.
    """

    def __init__(  # noqa: PLR0913 - as Keras
        self,
        max_tokens: int | None = None,
        standardize: str | Callable[[str], str] | None = "lower_and_strip_punctuation",
        split: str | Callable[[str], list[str]] | None = "whitespace",
        ngrams: int | Sequence[int] | None = None,
        output_mode: str = "int",
        output_sequence_length: int | None = None,
        *,
        pad_to_max_tokens: bool = False,
        vocabulary: Any = None,
        idf_weights: Any = None,
        sparse: bool = False,
        ragged: bool = False,
        encoding: str = "utf-8",
    ) -> None:
        super().__init__()
        layer = "TextVectorization"
        check_mode(layer, output_mode, allowed=OUTPUT_MODES, sparse=sparse or ragged)
        if not callable(standardize) and standardize not in _STANDARDIZE:
            raise ValueError(
                f"{layer}: standardize={standardize!r}; one of {list(_STANDARDIZE)} or a function is needed."
            )
        if not callable(split) and split is not None and split not in _SPLIT:
            raise ValueError(f"{layer}: split={split!r}; it must be None, one of {list(_SPLIT)}, or a function.")
        length: Any = output_sequence_length
        if length is not None and (output_mode != "int" or not isinstance(length, int) or length < 0):
            raise ValueError(
                f'{layer}: output_sequence_length={length!r}; an int of 0 or more is needed, and output_mode="int".'
            )
        self.standardize, self.split = standardize, split
        self.widths = _widths(ngrams)
        self.output_mode, self.output_sequence_length = output_mode, output_sequence_length
        self.lookup = StringLookup(
            max_tokens,
            mask_token="",
            vocabulary=vocabulary,
            idf_weights=idf_weights,
            output_mode=output_mode,
            pad_to_max_tokens=pad_to_max_tokens,
            encoding=encoding,
        )

    def adapt(self, data: Any, *, strategy: Strategy | None = None) -> None:
        """Learns the vocabulary; see ``StringLookup.adapt``. Collective: every rank calls this."""
        self.lookup.learn(data, lambda batch: self._rows(batch)[0], strategy=strategy)

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[str]:  # noqa: FBT001, FBT002 - as Keras
        """The tokens, ordered by index. Local."""
        return self.lookup.get_vocabulary(include_special_tokens)

    def vocabulary_size(self) -> int:
        """The number of tokens, with padding and special tokens. Local."""
        return self.lookup.vocabulary_size()

    def set_vocabulary(self, vocabulary: Sequence[str], idf_weights: Sequence[float] | None = None) -> None:
        """Sets the tokens; see ``StringLookup``. Local."""
        self.lookup.set_vocabulary(vocabulary, idf_weights)

    @property
    def idf_weights(self) -> Tensor | None:
        """With ``"tf_idf"``, the weight of each token, float32."""
        return self.lookup.idf_weights

    def _rows(self, inputs: Any) -> tuple[list[list[str]], tuple[int, ...]]:
        """The tokens of each text (for rank 2 without ``split``, of each row), and the shape of the input."""
        flat, shape = strings(inputs, "TextVectorization")
        if self.split is not None and (len(shape) > 2 or (len(shape) == 2 and shape[1] != 1)):
            raise ValueError(
                f"TextVectorization: the input has shape {shape}; with split each text is a row, so (n,) or (n, 1) is "
                "needed."
            )
        texts = [self._standard(text) for text in flat]
        if self.split is None:
            width = shape[-1] if len(shape) > 1 else 1
            rows = [texts[place : place + width] for place in range(0, len(texts), width)] if width else []
        else:
            split = self.split if callable(self.split) else _SPLIT[self.split]
            rows = [split(text) for text in texts]
        if self.widths is not None:
            rows = [_joined(row, self.widths) for row in rows]
        return rows, shape

    def _standard(self, text: str) -> str:
        if callable(self.standardize):
            return self.standardize(text)
        for table in _STANDARDIZE[self.standardize]:
            text = text.translate(table)
        return text

    def forward(self, inputs: Any) -> Tensor:
        """The indices ``(n, length)`` or vectors ``(n, depth)``; for a single text without ``n``. Local.

        With ``"one_hot"`` there is a vector for each token, ``(n, length, depth)``, as for ``StringLookup``.

        Args:
          inputs: a text, or lists or arrays of texts of shape ``(n,)`` or ``(n, 1)``; any shape without ``split``.

        Raises:
          RuntimeError: the layer has learned nothing yet.
          TypeError: the input holds no strings.
          ValueError: the shape does not fit.
        """
        vocabulary = self.lookup.vocabulary()
        rows, shape = self._rows(inputs)
        ids = vocabulary.ids_of_texts(list(chain.from_iterable(rows)))
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        longest = int(lengths.max()) if len(rows) else 0
        padding = 0 if self.output_mode == "int" else -1
        found = torch.full((len(rows), longest), padding, dtype=torch.int64)
        found[torch.arange(longest) < lengths.unsqueeze(1)] = ids
        if self.output_mode != "int":
            found = vocabulary.output(found)
            return found if shape else found[0]
        if self.output_sequence_length is not None:
            found = found[:, : self.output_sequence_length]
            missing = self.output_sequence_length - found.shape[1]
            found = torch.nn.functional.pad(found, (0, missing))
        elif self.split is None and self.widths is None:
            return found.reshape(shape)
        return found if shape else found[0]


def _widths(ngrams: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if ngrams is None:
        return None
    if isinstance(ngrams, int):
        widths = tuple(range(1, ngrams + 1))
    elif isinstance(ngrams, list | tuple) and all(isinstance(each, int) for each in ngrams):
        widths = tuple(ngrams)
    else:
        raise ValueError(f"TextVectorization: ngrams={ngrams!r}; None, an int or a tuple of ints is needed.")
    if not widths or min(widths) < 1:
        raise ValueError(f"TextVectorization: ngrams={ngrams!r}; each width must be 1 or more.")
    return widths


def _joined(tokens: list[str], widths: Sequence[int]) -> list[str]:
    return [" ".join(tokens[at : at + width]) for width in widths for at in range(len(tokens) - width + 1)]
