"""RoPE tables and the attention mask against Hugging Face and against their definition."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pdconvert.runtime.mask import MASKED, causal_mask
from pdconvert.runtime.rope import rope_tables

SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize(("start", "length"), [(0, 128), (300, 16)])
def test_tables_equal_hugging_face(kind, start, length):
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=512, rope_parameters=SCALINGS[kind]
    )
    rotary = LlamaRotaryEmbedding(config)
    positions = torch.arange(start, start + length)[None]
    expected = rotary(torch.zeros(1), positions)
    inv_freq = rotary.inv_freq.double().tolist()
    found = rope_tables(inv_freq, rotary.attention_scaling, start, length, np.float32)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == (1, 1, 16, length)
        np.testing.assert_allclose(ours[0, 0].T, theirs[0].numpy(), rtol=0, atol=3e-5)


def test_tables_are_fp16_and_fill_both_halves():
    cos, sin = rope_tables([1.0, 0.01], 0.5, 7, 3)
    assert cos.dtype == sin.dtype == np.float16
    np.testing.assert_array_equal(cos[0, 0, :2], cos[0, 0, 2:])
    np.testing.assert_array_equal(sin[0, 0, :2], sin[0, 0, 2:])
    assert cos[0, 0, 0, 0] == np.float16(0.5 * np.cos(7.0))


def test_far_positions_keep_their_precision():
    cos, _ = rope_tables([0.7498942093324559], 1.0, 100_000, 1, np.float64)
    assert cos[0, 0, 0, 0] == np.cos(100_000 * 0.7498942093324559)


@pytest.mark.parametrize(
    ("past", "capacity", "new", "tokens"),
    [(0, 0, 1, 1), (0, 0, 5, 8), (0, 0, 8, 8), (0, 6, 3, 4), (4, 6, 3, 4), (6, 6, 4, 4), (1, 512, 1, 1)],
)
def test_mask_shows_the_past_and_the_new_tokens_up_to_the_query(past, capacity, new, tokens):
    mask = causal_mask(past, capacity, new, tokens)
    assert mask.shape == (1, 1, capacity + tokens, tokens)
    assert mask.dtype == np.float16
    assert np.isfinite(mask).all()
    for query in range(tokens):
        visible = {key for key in range(capacity + tokens) if mask[0, 0, key, query] == 0}
        assert visible == set(range(past)) | {capacity + j for j in range(query + 1)}
    assert set(np.unique(mask)) <= {0, np.float16(MASKED)}


def test_no_real_query_sees_a_padded_key():
    mask = causal_mask(2, 4, 3, 8)[0, 0]
    assert (mask[4 + 3 :, :3] == np.float16(MASKED)).all()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((5, 4, 1, 1), "5 past tokens do not fit 4 columns"),
        ((-1, 4, 1, 1), "-1 past tokens do not fit 4 columns"),
        ((0, 0, 0, 8), "0 new tokens do not fit 8 columns"),
        ((0, 0, 9, 8), "9 new tokens do not fit 8 columns"),
    ],
)
def test_mask_refuses_lengths_outside_its_columns(lengths, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        causal_mask(*lengths)
