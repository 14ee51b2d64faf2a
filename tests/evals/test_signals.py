"""Token signals against torch's own loss functions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from replayssm_quant.evals import signals as module
from replayssm_quant.evals.signals import Reference, join, signals


def _logits(seed: int, b: int = 2, t: int = 9, v: int = 40) -> torch.Tensor:
    return torch.randn(b, t, v, generator=torch.Generator().manual_seed(seed)) * 3


def _reference(logits: torch.Tensor) -> Reference:
    reference = Reference()
    for row in logits[:, :-1]:
        reference.add(row)
    return reference


def test_divergence_is_kl_of_reference_from_candidate() -> None:
    p, q = _logits(0), _logits(1)
    ids = torch.randint(0, 40, (2, 9))
    found = signals(q, ids, 0, _reference(p))
    want = F.kl_div(
        q[:, :-1].double().log_softmax(-1),
        p[:, :-1].double().log_softmax(-1),
        log_target=True,
        reduction="none",
    ).sum(-1)
    np.testing.assert_allclose(found.kld, want.numpy(), rtol=1e-12)
    assert (found.agree == (p.argmax(-1) == q.argmax(-1))[:, :-1].numpy()).all()


def test_loss_and_rightness_shift_by_one_token() -> None:
    logits = _logits(2)
    ids = logits.argmax(-1).roll(1, 1)  # each token is what the previous logits prefer
    found = signals(logits, ids, 0, None)
    assert found.right.all() and found.kld is None
    want = F.cross_entropy(
        logits[:, :-1].double().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    np.testing.assert_allclose(found.loss.ravel(), want.numpy(), rtol=1e-12)


def test_rows_of_later_batches_meet_their_own_reference() -> None:
    p, q = _logits(3, b=5), _logits(4, b=5)
    ids = torch.zeros(5, 9, dtype=torch.long)
    reference = _reference(p)
    whole = signals(q, ids, 0, reference)
    parts = join([signals(q[i : i + 2], ids[i : i + 2], i, reference) for i in (0, 2, 4)])
    np.testing.assert_array_equal(whole.kld, parts.kld)
    np.testing.assert_array_equal(whole.loss, parts.loss)


def test_large_vocabulary_lumps_the_tail_into_a_lower_bound(monkeypatch) -> None:
    p, q = _logits(5, v=60), _logits(6, v=60)
    ids = torch.zeros(2, 9, dtype=torch.long)
    full = signals(q, ids, 0, _reference(p))
    monkeypatch.setattr(module, "FULL_VOCABULARY", 10)
    monkeypatch.setattr(module, "SUPPORT", 12)
    reference = _reference(p)
    lumped = signals(q, ids, 0, reference)
    assert "top 12" in reference.support
    assert (lumped.kld <= full.kld + 1e-12).all() and lumped.kld.mean() > 0.3 * full.kld.mean()
    p0, q0 = (x[0, 0].double().softmax(-1) for x in (p, q))
    best = p0.topk(12).indices
    rest_p, rest_q = 1 - p0[best].sum(), 1 - q0[best].sum()
    want = (p0[best] * (p0[best] / q0[best]).log()).sum() + rest_p * (rest_p / rest_q).log()
    assert lumped.kld[0, 0] == pytest.approx(float(want), rel=1e-9)
    monkeypatch.setattr(module, "SUPPORT", 60)
    np.testing.assert_allclose(signals(q, ids, 0, _reference(p)).kld, full.kld, rtol=1e-6)


def test_equal_logits_diverge_by_exactly_nothing() -> None:
    p = _logits(7)
    found = signals(p.clone(), torch.zeros(2, 9, dtype=torch.long), 0, _reference(p))
    assert (found.kld == 0).all() and found.agree.all()


def test_a_broken_token_is_wrong_and_infinitely_far() -> None:
    p, q = _logits(8), _logits(8)
    q[1, 4, 7] = float("nan")
    ids = p.argmax(-1).roll(1, 1)
    found = signals(q, ids, 0, _reference(p))
    assert found.finite.sum() == found.finite.size - 1 and not found.finite[1, 4]
    assert np.isinf(found.kld[1, 4]) and np.isinf(found.loss[1, 4])
    assert not found.right[1, 4] and not found.agree[1, 4]
    assert np.isfinite(np.delete(found.kld.ravel(), 1 * 8 + 4)).all()


def test_chunks_of_tokens_change_nothing(monkeypatch) -> None:
    p, q = _logits(9), _logits(10)
    ids = torch.randint(0, 40, (2, 9))
    whole = signals(q, ids, 0, _reference(p))
    monkeypatch.setattr(module, "_CHUNK", 3 * 40)
    chunked = signals(q, ids, 0, _reference(p))
    np.testing.assert_array_equal(whole.kld, chunked.kld)
    np.testing.assert_array_equal(whole.loss, chunked.loss)
