"""The benchmark of verify steps: cursors, bytes, the gate, and vLLM's kernels where they are."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from replayssm_quant.kernels.bench import run, verify, vllm_baselines  # noqa: E402
from replayssm_quant.kernels.bench.registry import DESIGNS  # noqa: E402
from replayssm_quant.kernels.gdn import reference as gdn  # noqa: E402
from replayssm_quant.kernels.mamba2 import reference as mamba2  # noqa: E402
from replayssm_quant.state.geometry import LayerGeometry  # noqa: E402

CPU = torch.device("cpu")
GEOMETRY = {
    "mamba2": LayerGeometry("mamba2", 4, 8, 32, 2),
    "gdn": LayerGeometry("gdn", 4, 8, 32, 2),
}


def problem(kind: str, design: str = "nvfp4+fp16-sr", tokens: int = 4, batch: int = 6):
    return verify.VerifyProblem(
        verify.OPS[f"{kind}_verify"], GEOMETRY[kind], DESIGNS[design], batch,
        device=CPU, dtype=torch.float32, sets=1, tokens=tokens,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [4, 5, 8])
def test_cursors_are_those_of_requests_that_keep_as_many(tokens: int) -> None:
    """Followed from step to step, a row's cursors obey the rule of the pool."""
    kept = verify.kept_tokens(tokens)
    for row in range(7):
        for step in range(40):
            valid, flush = verify.cursor("mix", step, row, kept, 16)
            following, _ = verify.cursor("mix", step + 1, row, kept, 16)
            assert following == (0 if flush else valid) + kept
            assert flush == (valid >= 16) and valid < 16 + tokens
    assert verify.cursor("flush", 3, 1, kept, 16)[1]
    assert not any(verify.cursor("readout", s, 0, kept, 16)[1] for s in range(9))


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_bytes_of_a_pass(kind: str) -> None:
    """A mixed pass moves what the layout says a step moves on average."""
    p = problem(kind)
    steps = p.verify_steps("mix")
    assert len(steps) % math.ceil(16 / p.kept) == 0
    average = sum(s.nbytes for s in steps) / len(steps) / p.batch
    assert average == pytest.approx(sum(p.layout.verify_bytes(p.kept)))


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_the_gate_passes_and_finds_a_wrong_step(kind: str, monkeypatch) -> None:
    assert verify.gate(problem(kind), "reference").output < 1e-5
    wrong = problem(kind)
    right = wrong.verify

    def swapped(step, impl=None):
        return right(step, impl).flip(1)  # the tokens in the wrong order

    monkeypatch.setattr(wrong, "verify", swapped)
    with pytest.raises(run.Red, match="y differs"):
        verify.gate(wrong, "reference")
    late = problem(kind)
    good = late.verify

    def unflushed(step, impl=None):
        still = torch.zeros_like(step.rows.flush)
        off = dataclasses.replace(step.rows, flush=still, fold_slots=None)
        return good(dataclasses.replace(step, rows=off), impl)

    monkeypatch.setattr(late, "verify", unflushed)
    with pytest.raises(run.Red):
        verify.gate(late, "reference")


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_vllm_steps_by_the_recurrence(kind: str) -> None:
    """vLLM's kernel starts from the last accepted token's state and leaves one for every token."""
    path = os.environ.get("REPLAYSSM_VLLM", "")
    if not Path(path).exists() or not path:
        pytest.skip("REPLAYSSM_VLLM names no vLLM wheel or folder")
    vllm = vllm_baselines.load(path)
    update = verify.load_gdn_spec(path) if kind == "gdn" else None
    native = verify.NativeVerify(
        vllm, update, verify.OPS[f"{kind}_verify"], GEOMETRY[kind], 2, 3, "fp32", CPU, sets=1
    )
    slots, made = native.pool.slots[0], native.inputs[0]
    inputs = verify.Inputs({k: v.float() for k, v in made.step.items()}, made.weights)
    native.out = native.out.float()
    state = native.pool.state[slots.view(2, 3)[:, 1].long()].clone().double()  # kept is 2
    y = native.step(slots, inputs).view(2, 3, 4, 8)

    def unit(k: torch.Tensor) -> torch.Tensor:
        return (k * gdn.inverse_norm(k)[..., None]).repeat_interleave(2, 1)

    for t in range(3):
        i = {k: v.unflatten(0, (2, 3))[:, t].double() for k, v in inputs.step.items()}
        if kind == "mamba2":
            w = {k: v.double() for k, v in inputs.weights.items()}
            dt = torch.nn.functional.softplus(i["dt"] + w["dt_bias"])
            want, state = mamba2.recurrent_step(state, i["x"], dt, w["A"], i["B"], i["C"])
            want = want + w["D"][:, None] * i["x"]
        else:
            q, k = unit(i["q"]) * 32**-0.5, unit(i["k"])
            want, state = gdn.recurrent_step(state, q, k, i["v"], i["g"][..., None], i["beta"])
        torch.testing.assert_close(y[:, t].double(), want, rtol=1e-4, atol=1e-5)
        stored = native.pool.state[slots.view(2, 3)[:, t].long()].double()
        torch.testing.assert_close(stored, state, rtol=1e-4, atol=1e-5)


def test_the_command(capsys) -> None:
    with pytest.raises(SystemExit, match="tokens 2 to 8"):
        verify.main(["--op", "gdn_verify", "--tokens", "1"])
    with pytest.raises(SystemExit, match="unknown design 'fp5'"):
        verify.main(["--op", "gdn_verify", "--design", "fp5"])
    if not torch.cuda.is_available():
        assert verify.main(["--op", "mamba2_verify"]) == 2
        assert "needs a CUDA GPU" in capsys.readouterr().err


def test_the_report(tmp_path) -> None:
    """Newest rows of a point, all phases at the target's, a line a batch and T, the verdict."""
    common = {
        "op": "mamba2_verify", "geometry": "super", "gpu": "NVIDIA H200", "triton": "3.6.0",
        "vllm": "0.33.0", "commit": "0123456789abcdef", "date": "2026-11-29",
        "copy_fraction": 0.5, "ratio_native_fp16": None, "ratio_upstream_replay_fp32": 1.25,
    }  # fmt: skip

    def row(design: str, batch: int, tokens: int, time: float, ratio: float | None, phase="mix"):
        values = {"batch": batch, "tokens": tokens, "kept": verify.kept_tokens(tokens)}
        values |= {"phase": phase, "design": design, "time_us": time, "ratio_native_fp32": ratio}
        return {**common, **values}

    rows = [
        row("vllm-native-fp32", 256, 5, 900.0, 1.0),
        row("P4+8-sr-rot", 256, 5, 250.0, 3.6),
        row("P4+8-sr-rot", 256, 5, 150.0, 6.0, "readout"),
        row("fp32", 256, 5, 200.0, 4.5),
        row("P4+8-sr-rot", 8, 4, 20.0, 0.9),
    ]
    older = [row("P4+8-sr-rot", 256, 5, 1.0, 900.0), row("P4+8-sr-rot", 1, 5, 7.0, 1.5)]
    assert verify.report(tmp_path) == []
    run.write_json(tmp_path / "mamba2_verify-h200-2026-11-28.json", older)
    run.write_json(tmp_path / "mamba2_verify-h200-2026-11-29.json", rows)
    text = "\n".join(verify.report(tmp_path))
    assert "| 256 | 5 | 3 | 200.0 (4.50x) | 250.0 (3.60x) | 900.0 |" in text
    assert "| 8 | 4 | 2 | – | 20.0 (0.90x) | – |" in text
    assert "| 1 | 5 | 3 | – | 7.0 (1.50x) | – |" in text
    assert "| P4+8-sr-rot | 150.0 | 0.50 | – | – | 250.0 | 0.50 | 3.60 | – | 1.25 |" in text
    assert "x vLLM's fp32 step | 3.00 | 3.60 | yes |" in text
    rows[1]["ratio_native_fp32"] = 2.9
    assert "| 3.00 | 2.90 | no |" in "\n".join(verify.section(rows))


def test_upstream_steps(monkeypatch) -> None:
    """Cursors of upstream's ring, and the check of y: passed by the recurrence, not by another."""

    def recurrence(late: int):
        def function(state, x, dt, A, B, C, out, xs, Bs, dts, start, before, D, z, bias, *rest):
            slots, ring = rest[1], xs.shape[2]
            per = x.shape[2] // B.shape[2]
            for row, slot in enumerate(slots.tolist()):
                held = int(before[slot])
                at = (int(start[slot]) + torch.arange(held)) % ring
                s = state[slot].double()
                past = (xs[slot][:, at], dts[slot][:, at], Bs[slot][:, at])
                now = torch.nn.functional.softplus(dt[row, ..., 0].double() + bias[:, 0])
                for t in range(held + x.shape[1]):
                    if t < held:
                        x_t, dt_t, B_t = (v[:, t] for v in past)
                    else:
                        i = t - held
                        x_t, dt_t, B_t = x[row, i], now[i], B[row, i]
                    B_t = B_t.double().repeat_interleave(per, 0)
                    s = s * torch.exp(dt_t.double() * A[:, 0, 0])[:, None, None]
                    s = s + (dt_t.double()[:, None] * x_t.double())[:, :, None] * B_t[:, None]
                    if t >= held:
                        C_t = C[row, (i + late) % x.shape[1]].double().repeat_interleave(per, 0)
                        out[row, i] = (s * C_t[:, None]).sum(-1) + D[:, :1] * x_t.double()

        return function

    made = [
        verify.UpstreamVerify(
            recurrence(late), verify.OPS["mamba2_verify"], GEOMETRY["mamba2"], 6, 5, "fp32", CPU, 1
        )
        for late in (0, 1)
    ]
    assert made[0].check() < run.OUTPUT_BOUND[torch.bfloat16] < made[1].check()
    assert made[0].cycle == [3, 6, 9, 12]
    for tokens in (2, 4, 5, 8):
        one = verify.UpstreamVerify(
            recurrence(0),
            verify.OPS["mamba2_verify"],
            GEOMETRY["mamba2"],
            1,
            tokens,
            "fp32",
            CPU,
            1,
        )
        full = verify.UPSTREAM_WINDOW - tokens
        assert [n > full for n in one.cycle] == [False] * (len(one.cycle) - 1) + [True]
    launches = made[0].launches("mix")
    assert len(launches) % 4 == 0
    least = made[0].pool.state_bytes * 6
    assert all(least < nbytes < 2.5 * least for _, nbytes in launches)
    with pytest.raises(ValueError, match="give fp32=FILE"):
        verify.load_upstream("fp8=nothing.so")
