"""Codes packed by us are the codes that MLX packs and unpacks."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdconvert.quant.packing import code_offset, pack_words, signed_codes, unpack_words, unsigned_codes


def random_codes(seed: int, bits: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, shape, dtype=np.uint8)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from([2, 4, 8]),
    rows=st.integers(0, 4),
    blocks=st.integers(1, 5),
)
def test_round_trip(seed, bits, rows, blocks):
    codes = random_codes(seed, bits, (rows, 32 * blocks))
    words = pack_words(codes, bits)
    assert words.dtype == np.uint32
    assert words.shape == (rows, blocks * bits)
    np.testing.assert_array_equal(unpack_words(words, bits), codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_first_code_lies_in_the_lowest_bits(bits):
    codes = np.zeros((1, 32), np.uint8)
    codes[0, :3] = [1, 2, 3]
    assert pack_words(codes, bits)[0, 0] == 1 + (2 << bits) + (3 << 2 * bits)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_mlx_reads_the_same_codes(bits, group):
    codes = random_codes(7, bits, (6, 256))
    ones = mx.ones((6, 256 // group), dtype=mx.float32)
    words = mx.array(pack_words(codes, bits))
    values = mx.dequantize(words, ones, mx.zeros_like(ones), group_size=group, bits=bits)
    np.testing.assert_array_equal(np.array(values), codes.astype(np.float32))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_we_read_the_words_that_mlx_wrote(bits):
    weight = mx.array(np.random.default_rng(3).standard_normal((8, 128)).astype(np.float32))
    words, scales, biases = mx.quantize(weight, group_size=64, bits=bits)
    codes = unpack_words(np.array(words), bits).reshape(8, 2, 64)
    ours = codes * np.array(scales)[..., None] + np.array(biases)[..., None]
    theirs = mx.dequantize(words, scales, biases, group_size=64, bits=bits)
    np.testing.assert_allclose(ours.reshape(8, 128), np.array(theirs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_signed_code_survives(bits):
    offset = code_offset(bits)
    signed = np.arange(-offset, offset, dtype=np.int64).astype(np.int8)
    unsigned = unsigned_codes(signed, bits)
    np.testing.assert_array_equal(unsigned, np.arange(2 * offset))
    np.testing.assert_array_equal(signed_codes(unsigned, bits), signed)


def test_packing_leaves_its_input_alone():
    codes = np.arange(-8, 8, dtype=np.int8).repeat(2)
    before = codes.copy()
    pack_words(unsigned_codes(codes, 4), 4)
    np.testing.assert_array_equal(codes, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pack_words(np.zeros((1, 3), np.uint8), 8),
            "a row of 3 codes of 8 bits does not fill its 32-bit words",
        ),
        (lambda: pack_words(np.full((1, 8), 16, np.uint8), 4), "code 16 has more than 4 bits"),
        (lambda: pack_words(np.zeros((1, 8), np.int8), 4), "codes have dtype int8, expected uint8"),
        (
            lambda: pack_words(np.zeros((1, 32), np.uint8), 3),
            "3 bits cannot be packed, expected one of 2, 4, 8",
        ),
        (lambda: unpack_words(np.zeros((1, 8), np.int32), 4), "words have dtype int32, expected uint32"),
        (lambda: unsigned_codes(np.array([8], np.int8), 4), "codes span 8..8, which 4 bits do not hold"),
        (lambda: unsigned_codes(np.array([8], np.int16), 4), "codes have dtype int16, expected int8"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()
