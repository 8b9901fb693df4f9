"""The bytes of files, as their formats have them."""

from __future__ import annotations

import io
import struct
import warnings
from typing import Any

import numpy as np

from torchdistinput.sources.formats.tfrecords import masked_crc32c


def tfrecord(*payloads: bytes, good: bool = True, good_length: bool = True) -> bytes:
    """Records of TFRecord; their checksums fit, if they are to be good."""
    whole = b""
    for payload in payloads:
        length = struct.pack("<Q", len(payload))
        whole += length + struct.pack("<I", masked_crc32c(length) ^ (not good_length))
        whole += payload + struct.pack("<I", masked_crc32c(payload) ^ (not good))
    return whole


def npy(array: np.ndarray[Any, Any], version: tuple[int, int] | None = None) -> bytes:
    """A file of NumPy."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # versions 2 and 3 are announced
        np.lib.format.write_array(stream, array, version=version)
    return stream.getvalue()
