"""Bad checkpoints through the real command line: what each way to be wrong says, and that nothing is left behind.

In an expected message `{}` is the checkpoint's folder and … stands for anything.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import (
    WEIGHTS,
    Change,
    base,
    both,
    checkpoint,
    config,
    content,
    gone,
    json_file,
    link,
    refusal,
    rope,
    says,
    surroundings,
)

__all__ = ["base", "checkpoint", "surroundings"]

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
DEEP = b"[" * 100_000
SOURCE = "\n  source: {}"

CONFIG: dict[str, tuple[Change, str]] = {
    "empty": (content("config.json", b""), "{}/config.json: the file is empty (0 bytes); download it again"),
    "no JSON": (content("config.json", b"{"), "{}/config.json: not JSON: … in line 1"),
    "not text": (
        content("config.json", b"\xff\xfe\x00"),
        "{}/config.json: not JSON: not text in UTF-8 (byte 2)",
    ),
    "no object": (content("config.json", b"[]"), "{}/config.json: expected a JSON object, found list"),
    "deeply nested": (content("config.json", DEEP), "{}/config.json: damaged: …; download it again"),
    "a number of 5000 digits": (
        content("config.json", b"9" * 5000),
        "{}/config.json: damaged: …; download it again",
    ),
    "git-lfs": (content("config.json", LFS), "{}/config.json: a git-lfs pointer, …; run `git lfs pull` …"),
    "gone": (gone("config.json"), "{}: no config.json; …"),
    "a broken link": (link("config.json"), "{}/config.json: no such file (a link to a file that is gone)"),
    "no model_type": (
        content("config.json", b"{}"),
        "{}/config.json: no model_type; expected the config of a causal LM",
    ),
    "experts": (
        config(model_type="mixtral"),
        "model_type 'mixtral' is not supported: it is a mixture of …; supported: …llama…",
    ),
    "states": (config(model_type="mamba"), "model_type 'mamba' is not supported: it is …; supported: …"),
    "images": (config(model_type="llava"), "model_type 'llava' is not supported: it is …; supported: …"),
    "unknown type": (
        config(model_type="zorg"),
        "model_type 'zorg' is not supported; supported: …llama…" + SOURCE,
    ),
    "mistyped type": (
        config(model_type="Llama"),
        "model_type 'Llama' is not supported (did you mean llama?); supported: …" + SOURCE,
    ),
    "unknown key": (
        config(final_logit_softcapping=3.0),
        "config.json: the llama family does not know final_logit_softcapping=3.0; …" + SOURCE,
    ),
    "heads and KV heads": (
        config(num_key_value_heads=3),
        "config.json: num_attention_heads 4 is not a multiple of num_key_value_heads 3" + SOURCE,
    ),
    "hidden size and heads": (
        config(hidden_size=66),
        "config.json: hidden_size 66 is not a multiple of num_attention_heads 4" + SOURCE,
    ),
    "hidden size and heads, with a head_dim": (
        config(num_attention_heads=6, head_dim=12),
        "config.json: hidden_size 64 is not a multiple of num_attention_heads 6, which is refused despite head_dim 12"
        + SOURCE,
    ),
    "a row too many in the embedding": (
        config(vocab_size=319),
        "{}: model.embed_tokens.weight has shape (320, 64), config.json asks for (319, 64)",
    ),
    "a cap that the family does not have": (
        config(attn_logit_softcapping=50.0),
        "config.json: the llama family does not know attn_logit_softcapping=50.0; …" + SOURCE,
    ),
    "odd head_dim": (
        config(head_dim=15),
        "config.json: head_dim 15 is odd; RoPE needs pairs" + SOURCE,
    ),
    "another head_dim": (
        config(head_dim=32),
        "{}: model.layers.0.self_attn.q_proj.weight has shape (64, 64), config.json asks for (128, 64)",
    ),
    "a size as text": (
        config(hidden_size="64"),
        "config.json: hidden_size must be a positive integer, not '64'" + SOURCE,
    ),
    "no layers": (
        config(num_hidden_layers=0),
        "config.json: num_hidden_layers must be a positive integer, not 0" + SOURCE,
    ),
    "absurdly many layers": (
        config(num_hidden_layers=10**9),
        "config.json: num_hidden_layers 1000000000 is more than any model has (at most 4096); …" + SOURCE,
    ),
    "absurdly many tokens": (
        config(vocab_size=10**12),
        "config.json: vocab_size 1000000000000 is more than any model has …" + SOURCE,
    ),
    "layers that are not there": (
        config(num_hidden_layers=3),
        "{}: 9 tensors (model.layers.2.…) are missing, as config.json describes the model",
    ),
    "thousands of layers that are not there": (
        config(num_hidden_layers=4096),
        "{}: 36846 tensors (…) are missing, as config.json describes the model",
    ),
    "layers too many in the file": (
        config(num_hidden_layers=1),
        "{}: 9 tensors (model.layers.1.…) are left over; …",
    ),
    "a flag as text": (
        config(attention_bias="yes"),
        "config.json: attention_bias must be true or false, not 'yes'" + SOURCE,
    ),
    "biases that are not there": (config(mlp_bias=True), "{}: 6 tensors (…bias, …) are missing, …"),
    "another activation": (
        config(hidden_act="gelu"),
        "config.json: hidden_act 'gelu' is not supported: …" + SOURCE,
    ),
    "eps of zero": (
        config(rms_norm_eps=0),
        "config.json: rms_norm_eps is 0, which mlx-lm refuses; set it to a small number, such as 1e-6"
        + SOURCE,
    ),
    "eps as text": (config(rms_norm_eps="1e-5"), "config.json: rms_norm_eps must be a number …" + SOURCE),
    "window": (config(sliding_window=16), "config.json: sliding_window …" + SOURCE),
    "context shorter than the function": (
        config(max_position_embeddings=64),
        "recipe: prefill_128 reaches position 128, the model ends at 64 (max_position_embeddings); "
        "give prefill.functions fewer tokens or past",
    ),
    "context as long as the function": (
        config(max_position_embeddings=128),
        "{}: the model's 128 positions leave nothing to score after 128 tokens of prefill; "
        "give prefill.functions at most 64 tokens",
    ),
    "EOS as text": (
        config(eos_token_id="2"),
        "config.json: eos_token_id is '2', expected an integer or a list of integers" + SOURCE,
    ),
    "tied heads that differ": (
        config(tie_word_embeddings=True),
        "{}: config.json says tie_word_embeddings, but lm_head.weight differs from …; …",
    ),
    "dynamic RoPE": (
        rope(rope_type="dynamic", factor=2.0),
        "config.json: rope type 'dynamic' is refused: its frequencies change with the prompt's length, …"
        + SOURCE,
    ),
    "longrope": (
        rope(rope_type="longrope", short_factor=[1.0], long_factor=[4.0]),
        "config.json: rope type 'longrope' …" + SOURCE,
    ),
    "unknown RoPE": (
        rope(type="su"),
        "config.json: rope type 'su' is not supported; supported: default, linear, llama3, yarn" + SOURCE,
    ),
    "RoPE without its factor": (
        rope(type="linear"),
        "config.json: rope type 'linear' needs a positive number factor, found None" + SOURCE,
    ),
    "RoPE base of zero": (
        config(rope_theta=0),
        "config.json: rope_theta must be a positive number, not 0" + SOURCE,
    ),
    "RoPE that is no object": (
        config(rope_scaling="x"),
        "config.json: rope_scaling must be an object, not 'x'" + SOURCE,
    ),
    "generation config": (
        content("generation_config.json", b"[]"),
        "{}/generation_config.json: expected a JSON object, found list",
    ),
    "EOS of the generation config": (
        content("generation_config.json", b'{"eos_token_id": [1, "x"]}'),
        "generation_config.json: eos_token_id is [1, 'x'], expected …" + SOURCE,
    ),
    "generation config, a broken link": (
        link("generation_config.json"),
        "{}/generation_config.json: no such file (a link to a file that is gone)",
    ),
}

TOKENIZERS: dict[str, tuple[Change, str]] = {
    "none": (
        gone("tokenizer.json", "tokenizer_config.json"),
        "{}: no tokenizer (tokenizer.json or tokenizer.model); add its files",
    ),
    "a broken link": (link("tokenizer.json"), "{}/tokenizer.json: no such file (a link to …)"),
    "git-lfs": (content("tokenizer.json", LFS), "{}/tokenizer.json: a git-lfs pointer, …"),
    "no vocabulary": (
        content("tokenizer.json", b"{}"),
        "{}/tokenizer.json: not a tokenizer file: no model.vocab",
    ),
    "an empty vocabulary": (
        json_file("tokenizer.json", lambda data: data | {"model": {"vocab": {}}, "added_tokens": []}),
        "{}: the tokenizer's vocabulary is empty; download its files again",
    ),
    "more ids than rows": (
        json_file("tokenizer.json", lambda data: data | {"model": {"vocab": {"a": 0, "b": 320}}}),
        "{}: the tokenizer has 321 ids, the embedding 320 rows; resize the embedding or use …",
    ),
    "an added token beyond the rows": (
        content("added_tokens.json", b'{"<x>": 400}'),
        "{}: the tokenizer has 401 ids, the embedding 320 rows; …",
    ),
    "an id below zero": (
        json_file("tokenizer.json", lambda data: data | {"model": {"vocab": {"a": -1}}}),
        "{}/tokenizer.json: not a tokenizer file: a token's id is not a whole number",
    ),
    "added tokens that are none": (
        json_file("tokenizer.json", lambda data: data | {"added_tokens": "x"}),
        "{}/tokenizer.json: not a tokenizer file: added_tokens is not a list of tokens",
    ),
    "settings of brackets": (
        content("tokenizer_config.json", DEEP),
        "{}/tokenizer_config.json: damaged: …; download it again",
    ),
    "a model that is garbage": (
        both(gone("tokenizer.json"), content("tokenizer.model", b"garbage")),
        "{}: its tokenizer cannot be loaded: …; download its files again, or give a tokenizer.json …",
    ),
}

CASES = {f"config: {name}": case for name, case in CONFIG.items()} | {
    f"tokenizer: {name}": case for name, case in TOKENIZERS.items()
}


@pytest.mark.parametrize(("change", "expected"), CASES.values(), ids=CASES)
def test_a_bad_checkpoint_is_refused(
    checkpoint: Path, tmp_path: Path, own_cache: Path, change: Change, expected: str
) -> None:
    change(checkpoint)
    said = refusal(["build", "tiny", "--source", str(checkpoint), "--out", "build/out"], tmp_path, own_cache)
    assert says(said, expected.replace("{}", str(checkpoint))), said


def test_more_windows_than_the_text_gives(checkpoint: Path, tmp_path: Path, own_cache: Path) -> None:
    args = ["build", "tiny", "--source", "checkpoint", "--set", "probe.eval_windows=1000000"]
    said = refusal(args, tmp_path, own_cache)
    assert says(
        said,
        "recipe: probe.eval_windows 1000000: the held-out text has … tokens, which give … windows of 256; "
        "ask for fewer",
    ), said


def test_a_build_is_no_source(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "build" / "prefill.mlpackage").mkdir(parents=True)
    said = refusal(["build", "tiny", "--source", "build", "--out", "out"], tmp_path, own_cache)
    assert said == (
        f"{tmp_path / 'build'}: no config.json; it holds what pdconvert writes: give the checkpoint that it was "
        "made from"
    )


def test_a_type_that_is_known_is_refused_without_torch(checkpoint: Path, tmp_path: Path) -> None:
    """Before any weight is looked at, and in a fraction of a second."""
    both(config(model_type="mixtral"), gone(WEIGHTS))(checkpoint)
    probe = "import sys, atexit; from pdconvert.cli import main; atexit.register(lambda: print('torch' in sys.modules))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", f"{probe}; main(['build', 'tiny', '--source', sys.argv[1]])", str(checkpoint)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert done.stderr.startswith("error: model_type 'mixtral' is not supported: it is a mixture of experts")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
