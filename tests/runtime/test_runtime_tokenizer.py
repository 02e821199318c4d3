"""Prompts to ids, one BOS, EOS sets, and streams of whole characters."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Fast

from pdconvert.errors import InputError
from pdconvert.runtime.tokenizer import Tokenizer, eos_token_ids, one_bos
from pdconvert.sources.tokenizer import write_byte_tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def save(folder: Path, fast: Fast, **config) -> Tokenizer:
    """A tokenizer of `tokenizers` as a Hugging Face folder, loaded by us."""
    fast.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return Tokenizer(folder)


def sentencepiece_like(adds_bos: bool = True, adds_eos: bool = False) -> Fast:
    """A tokenizer in the manner of Llama 2: words with ▁, byte fallback, one leading space dropped."""
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    tokens += ["▁", "▁a", "▁b", "a", "b", ",", "▁,", "あ", "▁the", "▁cat", "\n"]
    vocab = {token: index for index, token in enumerate(tokens)}
    fast = Fast(
        models.BPE(vocab, [("▁", "a"), ("▁", "b"), ("▁", ",")], unk_token="<unk>", byte_fallback=True)
    )
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    specials = [("<s>", 1), ("</s>", 2)]
    template = " ".join(["<s>"] * adds_bos + ["$A"] + ["</s>"] * adds_eos)
    fast.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    return fast


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder, 320, 256, 257)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def with_fallback(tmp_path_factory) -> Tokenizer:
    return save(tmp_path_factory.mktemp("fallback"), sentencepiece_like())


class TestBos:
    def test_plain_text_has_the_tokenizers_own(self, with_fallback, byte_level):
        assert with_fallback.encode("a b")[0] == 1
        assert with_fallback.encode("a b").count(1) == 1
        assert byte_level.encode("ab") == byte_level.encode("ab", chat=False) == [97, 98]

    @pytest.mark.parametrize("adds_bos", [True, False])
    @pytest.mark.parametrize("in_template", [True, False])
    def test_a_chat_has_exactly_one_where_either_puts_one(self, tmp_path, adds_bos, in_template):
        template = TEMPLATE if in_template else TEMPLATE.replace("{{ bos_token }}", "")
        tokenizer = save(tmp_path, sentencepiece_like(adds_bos), chat_template=template)
        ids = tokenizer.encode("a", chat=True)
        assert ids.count(1) == int(adds_bos or in_template)
        assert ids[0] == 1 or not (adds_bos or in_template)
        assert tokenizer.decode(ids).strip() == "[user]a[assistant]"

    def test_a_prompt_that_begins_with_the_bos_text_has_one(self, with_fallback):
        assert with_fallback.encode("<s>a").count(1) == 1

    def test_the_template_may_lie_in_its_own_file(self, tmp_path):
        (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}a{{ messages[0].content }}")
        tokenizer = save(tmp_path, sentencepiece_like(), chat_template=None)
        assert tokenizer.decode(tokenizer.encode("b", chat=True)) == "ab"

    @pytest.mark.parametrize(
        ("ids", "bos", "adds", "expected"),
        [
            ([1, 1, 5], 1, True, [1, 5]),
            ([1, 5, 1], 1, True, [1, 5, 1]),
            ([5], 1, True, [1, 5]),
            ([5], 1, False, [5]),
            ([1, 1, 1], 1, False, [1]),
            ([5], None, False, [5]),
            ([], 0, False, []),
            ([0, 0, 5], 0, False, [0, 5]),
        ],
    )
    def test_rule(self, ids, bos, adds, expected):
        assert one_bos(ids, bos, adds) == expected


class TestEos:
    @pytest.mark.parametrize("adds_bos", [True, False])
    def test_the_prompt_does_not_end_with_one(self, tmp_path, adds_bos):
        tokenizer = save(tmp_path, sentencepiece_like(adds_bos, adds_eos=True))
        assert tokenizer.encode("a b")[-1] != 2
        assert tokenizer.encode("a b</s>").count(2) == 1

    @pytest.mark.parametrize(
        ("config", "generation", "own", "expected"),
        [
            ({}, {}, None, set()),
            ({"eos_token_id": 3}, {}, None, {3}),
            ({"eos_token_id": 3}, {"eos_token_id": [4, 5]}, 6, {3, 4, 5, 6}),
            ({"eos_token_id": None}, {"eos_token_id": 0}, None, {0}),
            ({"eos_token_id": [2, 2]}, {"eos_token_id": 2}, 2, {2}),
        ],
    )
    def test_all_sources_together(self, config, generation, own, expected):
        assert eos_token_ids(config, generation, own) == expected

    @pytest.mark.parametrize("value", ["2", [2, None], True, 1.0])
    def test_refuses_other_types(self, value):
        message = (
            f"generation_config.json: eos_token_id is {value!r}, expected an integer or a list of integers"
        )
        with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
            eos_token_ids({}, {"eos_token_id": value}, None)


class TestStream:
    @pytest.mark.parametrize(
        "text", ["こんにちは", "naïve 😀👩‍👩‍👧 end", "a\u0301", "日本語 and more\n\n", "  two  spaces "]
    )
    def test_bytes_come_out_as_whole_characters(self, byte_level, text):
        ids = list(text.encode())
        pieces = stream(byte_level, ids)
        assert "".join(pieces) == text == byte_level.decode(ids)
        assert all("\ufffd" not in piece for piece in pieces)
        assert len([piece for piece in pieces if piece]) == len(text)

    def test_three_tokens_of_one_kana_come_at_once(self, byte_level):
        assert stream(byte_level, list("か".encode()), finish=False) == ["", "", "か"]

    def test_spaces_survive(self, with_fallback):
        ids = [
            with_fallback._tokenizer.convert_tokens_to_ids(t) for t in ("▁the", "▁cat", "▁,", "b", "▁", "▁a")
        ]
        assert stream(with_fallback, ids)[:-1] == ["the", " cat", " ,", "b", " ", " a"]

    def test_a_run_of_byte_tokens_is_held_until_it_ends(self, with_fallback):
        ids = [3 + byte for byte in "かき".encode()]
        a = with_fallback._tokenizer.convert_tokens_to_ids("a")
        assert stream(with_fallback, [*ids, a], finish=False) == [""] * 6 + ["かきa"]

    def test_special_tokens_give_no_text(self, byte_level):
        assert stream(byte_level, [97, 256, 98, 257]) == ["a", "", "b", "", ""]

    def test_an_id_without_a_token_gives_no_text(self, byte_level):
        assert stream(byte_level, [97, 5000, 98]) == ["a", "", "b", ""]

    def test_the_same_token_again_and_again(self, byte_level):
        assert stream(byte_level, [32] * 5 + [97])[:-1] == [" "] * 5 + ["a"]

    @settings(max_examples=150, deadline=None)
    @given(ids=st.lists(st.integers(0, 319), max_size=24))
    def test_pieces_add_up_to_the_text_of_any_bytes(self, byte_level, ids):
        assert "".join(stream(byte_level, ids)) == byte_level.decode(ids)

    @settings(max_examples=150, deadline=None)
    @given(
        ids=st.lists(
            st.one_of(
                st.integers(0, 2),
                st.sampled_from([3 + byte for byte in "か😀".encode()]),
                st.integers(3 + 256, 3 + 256 + 10),
            ),
            max_size=24,
        )
    )
    def test_pieces_add_up_to_the_text_with_byte_fallback(self, with_fallback, ids):
        assert "".join(stream(with_fallback, ids)) == with_fallback.decode(ids)


def stream(tokenizer: Tokenizer, ids: list[int], finish: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in ids]
    return [*pieces, detokenizer.finish()] if finish else pieces


class TestRefusals:
    @pytest.mark.parametrize("chat", [True, False])
    def test_an_empty_prompt(self, byte_level, with_fallback, chat):
        for tokenizer in (byte_level, with_fallback):
            with pytest.raises(InputError, match="^the prompt is empty; give at least one character"):
                tokenizer.encode("", chat=chat)

    def test_a_prompt_of_other_bytes(self, byte_level):
        with pytest.raises(
            InputError, match="^the prompt holds bytes that are not UTF-8; give it as UTF-8 text$"
        ):
            byte_level.encode(b"caf\xe9".decode("utf-8", "surrogateescape"))

    def test_a_chat_without_a_template(self, byte_level):
        with pytest.raises(InputError, match="the model has no chat template; run it without --chat"):
            byte_level.encode("a", chat=True)

    def test_a_template_that_fails(self, tmp_path):
        template = "{{ raise_exception('roles must\nalternate') }}"
        tokenizer = save(tmp_path, sentencepiece_like(), chat_template=template)
        with pytest.raises(InputError, match="its chat template fails: roles must alternate; run it without"):
            tokenizer.encode("a", chat=True)

    def test_a_folder_without_tokenizer(self, tmp_path):
        with pytest.raises(InputError, match="its tokenizer cannot be loaded: "):
            Tokenizer(tmp_path)

    def test_remote_code_is_not_run(self, tmp_path):
        mark = tmp_path / "ran"
        (tmp_path / "code.py").write_text(f"open({str(mark)!r}, 'w')\nclass Foo: pass\n")
        config = {"tokenizer_class": "Foo", "auto_map": {"AutoTokenizer": ["code.Foo", "code.Foo"]}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match="its tokenizer cannot be loaded: "):
            Tokenizer(tmp_path)
        assert not mark.exists()
