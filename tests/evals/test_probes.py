"""Documents: stable hashes, answers where the task puts them, text in any tokenizer."""

import numpy as np
import pytest

from replayssm_quant.evals import probes
from replayssm_quant.evals.tasks import TASKS


@pytest.fixture(scope="module")
def bytes_tokenizer(tiny_gdn):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_gdn, local_files_only=True)


@pytest.fixture(scope="module")
def words_tokenizer():
    """A tokenizer whose tokens are words, as no byte-level task can use."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    text = probes.held_out.heldout().tobytes().decode()
    trainer = trainers.WordLevelTrainer(vocab_size=500, special_tokens=["?"])
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


def test_streams_are_the_tasks_own(bytes_tokenizer) -> None:
    docs = probes.streams(TASKS["count"], 5, {"length": 64}, bytes_tokenizer)
    batch = TASKS["count"].sample(5, probes.DATA_SEED, length=64)
    np.testing.assert_array_equal(docs.ids, batch.ids)
    np.testing.assert_array_equal(docs.mask, batch.mask)
    assert not docs.likelihood and len(set(docs.doc_hashes)) == 5


def test_hashes_name_the_document_not_its_place(bytes_tokenizer) -> None:
    five = probes.streams(TASKS["count"], 5, {"length": 64}, bytes_tokenizer)
    two = probes.streams(TASKS["count"], 2, {"length": 64}, bytes_tokenizer)
    assert five.first(2).doc_hashes == two.doc_hashes == five.doc_hashes[:2]
    np.testing.assert_array_equal(five.first(2).mask, two.mask)
    other = probes.streams(TASKS["count"], 2, {"length": 64}, bytes_tokenizer, data_seed=1)
    assert not set(other.doc_hashes) & set(five.doc_hashes)


def test_prompts_end_where_the_target_begins(bytes_tokenizer) -> None:
    settings = {"length": 128, "decode": 40}
    docs = probes.prompts(TASKS["tally"], 3, settings, bytes_tokenizer)
    questions = TASKS["tally"].generations(3, probes.DATA_SEED, **settings)
    for prompt, target, counted, q in zip(
        docs.prompts, docs.targets, docs.counted, questions, strict=True
    ):
        assert bytes_tokenizer.decode(prompt) == q.prompt
        assert bytes_tokenizer.decode(target) == q.target and len(target) == 40
        # an answer follows a question mark and a key; nothing else is counted
        text = q.prompt[-2:] + q.target
        assert [i for i, c in enumerate(counted) if c] == [i for i in range(40) if text[i] == "?"]
    assert len(docs.first(2)) == 2 and docs.first(2).doc_hashes == docs.doc_hashes[:2]


def test_byte_tasks_need_a_byte_level_tokenizer(words_tokenizer) -> None:
    assert not probes.is_byte_level(words_tokenizer)
    with pytest.raises(ValueError, match="task count is written in single bytes.*use text"):
        probes.streams(TASKS["count"], 2, {}, words_tokenizer)
    with pytest.raises(ValueError, match="task tally is written in single bytes"):
        probes.prompts(TASKS["tally"], 2, {}, words_tokenizer)


def test_text_is_windowed_in_the_models_own_tokens(words_tokenizer) -> None:
    docs = probes.streams(TASKS["text"], 4, {"length": 30}, words_tokenizer)
    assert docs.ids.shape == (4, 30) and docs.likelihood and docs.mask[:, :-1].all()
    whole = words_tokenizer(probes.held_out.heldout().tobytes().decode())["input_ids"]
    line = " ".join(map(str, whole))
    for row in docs.ids:
        assert " ".join(map(str, row)) in line
    with pytest.raises(ValueError, match="fewer than one window of 10000000"):
        probes.streams(TASKS["text"], 1, {"length": 10_000_000}, words_tokenizer)


def test_hash_parts_do_not_run_together() -> None:
    assert probes.short_hash("ab", "c") != probes.short_hash("a", "bc")
    assert probes.short_hash("ab") == probes.short_hash(b"ab")
