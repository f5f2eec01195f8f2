# SPDX-License-Identifier: MIT
"""Cross-check with the reference safetensors library: reads the file of our writer, which holds
known tensors, and writes a file for our reader.  Usage: ... OURS THEIRS"""

import sys

import numpy
from safetensors import safe_open
from safetensors.numpy import save_file


def main(ours, theirs):
    with safe_open(ours, framework="numpy") as file:
        assert file.metadata()["made by"] == "bellows", file.metadata()
        assert set(file.keys()) == {"f32", "u8", "i64", "empty", "scalar", "bf16"}, file.keys()
        expected = numpy.arange(6, dtype=numpy.float32).reshape(2, 3) / 2 - 1
        assert numpy.array_equal(file.get_tensor("f32"), expected)
        assert numpy.array_equal(file.get_tensor("u8"), numpy.arange(5, dtype=numpy.uint8))
        assert numpy.array_equal(file.get_tensor("i64"), numpy.array([-(2**62), 3]))
        assert file.get_tensor("empty").shape == (0, 4)
        assert file.get_tensor("scalar").shape == () and file.get_tensor("scalar") == 7.5
        assert file.get_slice("bf16").get_shape() == [2, 2]
        assert file.get_slice("bf16").get_dtype() == "BF16"
    save_file(
        {
            "weights": numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
            "ids": numpy.array([1, 2**40, -3], dtype=numpy.int64),
            "bytes": numpy.arange(3, dtype=numpy.uint8),
            "half": numpy.array([1.5], dtype=numpy.float16),
        },
        theirs,
        metadata={"made by": "the reference"},
    )


main(*sys.argv[1:])
