"""Runs in the interpreter that has vLLM: ``worker.py JOB.json OUT.json``. No test lives here.

A job is a list of scenarios; each makes an engine, feeds it requests step by step, and reports the
tokens, the top-2 gaps and what the plugin did; ``then`` feeds more of them to the same engine.
``against`` names the scenario whose tokens they should be: where a request parts from it, the
engine goes on from that scenario's token, so that what follows a tie is compared too (``parts``).
``signatures`` instead reports how our overrides compare with the vLLM that is installed.
"""

import copy
import gc
import inspect
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch

from replayssm_quant.backends.vllm.blocks import MARK
from replayssm_quant.backends.vllm.generate import make_llm


def make(scenario: dict[str, Any]) -> Any:
    """The scenario's engine.

    vLLM 0.32's CPU build installs its kernels anew for each engine, and trips over the compiled
    functions of the n-gram drafter if another engine used it before.
    """
    llm = make_llm(scenario["model"], scenario["options"], scenario["engine"])
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if current_platform.is_cpu() and hasattr(platform, "register_triton_kernel_overrides"):
        platform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    return llm


def layers_of(engine: Any) -> list[Any]:
    context = engine.vllm_config.compilation_config.static_forward_context
    return [x for x in context.values() if getattr(x, "page", None) is not None]


def drive(llm: Any, scenario: dict[str, Any]) -> dict[str, Any]:
    """Add request i at step ``arrive[i]``; alone: each only when the one before has finished.

    tokens: one number, or one a request. seeds: sampling seed of each request.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    preempted = []
    original = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *a, **k: (
        preempted.append(request.request_id),
        original(request, *a, **k),
    )[1]
    prompts = scenario["prompts"]
    arrive = scenario.get("arrive", [0] * len(prompts))
    tokens = scenario["tokens"]
    tokens = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    seeds = scenario.get("seeds", [None] * len(prompts))
    waiting = sorted(range(len(prompts)), key=lambda i: (arrive[i], i))
    common = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": 2}
    found: dict[int, Any] = {}
    memory: list[int] = []
    step, start = 0, time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        busy = engine.has_unfinished_requests()
        while waiting and arrive[waiting[0]] <= step and not (scenario.get("alone") and busy):
            i = waiting.pop(0)
            params = SamplingParams(**common, max_tokens=tokens[i], seed=seeds[i])
            engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, params)
            busy = True
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = output.outputs[0]
        if step % 100 == 99:
            memory.append(allocated())
        step += 1
    seconds = time.perf_counter() - start
    scheduler._preempt_request = original
    gaps = []
    for i in range(len(prompts)):
        tops = [sorted(x.logprob for x in d.values())[-2:] for d in found[i].logprobs]
        gaps.append([round(b - a, 6) for a, b in tops])
    return {
        "ids": [list(found[i].token_ids) for i in range(len(prompts))],
        "gaps": gaps,
        "preempted": len(preempted),
        "steps": step,
        "seconds": round(seconds, 3),
        "memory": memory,
        "prompts": prompts,
    }


ROUNDS = 6


def follow(
    llm: Any, scenario: dict[str, Any], found: dict[str, Any], wanted: dict[str, Any]
) -> dict[str, Any]:
    """Where requests part from ``wanted``, which may have more tokens, and whether they end alike.

    parts: [request, place, the larger of both gaps there]; behind each the request is run anew from
    wanted's tokens up to there. unfollowed: requests that still part after ``ROUNDS`` of that.
    """
    parts = []
    count = [len(ids) for ids in found["ids"]]
    start = [0] * len(count)
    seen = {row: (ids, found["gaps"][row]) for row, ids in enumerate(found["ids"])}
    for turn in range(ROUNDS + 1):
        again = []
        for row, (ids, gaps) in seen.items():
            theirs = wanted["ids"][row][start[row] : count[row]]
            at = next((i for i, (a, b) in enumerate(zip(ids, theirs, strict=True)) if a != b), None)
            if at is None:
                continue
            place = start[row] + at
            parts.append([row, place, max(gaps[at], wanted["gaps"][row][place])])
            start[row] = place + 1
            if start[row] < count[row]:
                again.append(row)
        if not again or turn == ROUNDS:
            return {"parts": parts, "unfollowed": again}
        left_out = ("arrive", "seeds", "then")
        more = {k: v for k, v in scenario.items() if k not in left_out}
        more["prompts"] = [
            scenario["prompts"][row] + wanted["ids"][row][: start[row]] for row in again
        ]
        more["tokens"] = [count[row] - start[row] for row in again]
        if scenario.get("seeds"):
            more["seeds"] = [scenario["seeds"][row] for row in again]
        result = drive(llm, more)
        seen = dict(zip(again, zip(result["ids"], result["gaps"], strict=True), strict=True))
    raise AssertionError


def allocated() -> int:
    """Bytes of torch tensors on this process's GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def watch(log: dict[str, Any]) -> None:
    """Note the slots of prefills and the flushes of decode steps."""
    from replayssm_quant.backends.vllm.cursors import SlotCursors
    from replayssm_quant.backends.vllm.drafts import DraftCursors
    from replayssm_quant.backends.vllm.metadata import RowPlanner

    decode, prefill = RowPlanner.decode, SlotCursors.prefill
    verify, prefill_drafts = DraftCursors.verify, DraftCursors.prefill

    def seen_verify(self: Any, out: Any, *args: Any) -> None:
        verify(self, out, *args)
        rows = out.rows
        live = rows.slots >= 0
        counts = rows.count[live].tolist()
        seen = {
            "rows": len(counts),
            "flushes": int(rows.flush.sum()),
            "drafted": sum(c > 1 for c in counts),
            "ragged": int(len(set(counts)) > 1),
            "rolled": int((out.shift[live] > 1).sum()),
            "rolled_without_drafts": int((out.shift[live] > 1).any() and max(counts) == 1),
        }
        for name, value in seen.items():
            log[name] = log.get(name, 0) + value

    def seen_prefill_drafts(self: Any, *args: Any) -> Any:
        rows, roll = prefill_drafts(self, *args)
        more = args[1] != args[2]
        log["folded"] = log.get("folded", 0) + int(rows.valid[more].sum())
        return rows, roll

    DraftCursors.verify, DraftCursors.prefill = seen_verify, seen_prefill_drafts

    def seen_decode(self: Any, *args: Any) -> Any:
        rows = decode(self, *args)
        log["rows"] = log.get("rows", 0) + int((rows.slots >= 0).sum())
        log["flushes"] = log.get("flushes", 0) + int(rows.flush.sum())
        log["together"] = log.get("together", 0) + int(self.planned is not None)
        return rows

    def seen_prefill(self: Any, *args: Any) -> Any:
        rows = prefill(self, *args)
        fresh = (args[1] == args[2]).tolist()
        slots = [s for s, f in zip(rows.slots.tolist(), fresh, strict=True) if f]
        log.setdefault("slots", []).extend(slots)
        keys = [k for k, f in zip(rows.key.tolist(), fresh, strict=True) if f]
        log.setdefault("keys", []).extend(keys)
        log["folded"] = log.get("folded", 0) + sum(
            v for v, f in zip(rows.valid.tolist(), fresh, strict=True) if not f
        )
        return rows

    RowPlanner.decode, SlotCursors.prefill = seen_decode, seen_prefill


def run(
    scenario: dict[str, Any], log: dict[str, Any], earlier: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    log.clear()
    said = listen()
    llm = make(scenario)
    layers = layers_of(llm.llm_engine)
    log.clear()
    if scenario.get("poison"):  # what an earlier tenant may leave: NaN in every format
        for layer in layers:
            layer.kv_cache[1].fill_(255)
    result = drive(llm, scenario)
    for name, more in scenario.get("then", {}).items():  # on the same engine, its slots used before
        result[name] = drive(llm, scenario | more)
    config = llm.llm_engine.vllm_config
    result |= {
        "layers": len(layers),
        "page": [layer.page.nbytes for layer in layers],
        "strides": [layer.kv_cache[1].stride(0) for layer in layers],
        "classes": sorted({type(layer).__name__ for layer in layers}),
        "block_size": config.cache_config.block_size,
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "log": dict(log),
        "spec": spec_metrics(llm),
        "cache_pages": cache_pages(llm),
        "said": said,
    }
    known = earlier | {scenario["name"]: result}
    for asked, one in [(scenario, result)] + [
        (scenario | {"against": None} | more, result[name])
        for name, more in scenario.get("then", {}).items()
    ]:
        if asked.get("against"):
            name, _, part = asked["against"].partition("/")
            wanted = known[name][part] if part else known[name]
            one |= follow(llm, asked, one, wanted)
    return result


def listen() -> list[str]:
    """What the plugin says from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.replayssm_quant").handlers = [handler]
    return said


def cache_pages(llm: Any) -> dict[str, list[int]]:
    """Bytes of the pages that vLLM fits its blocks to: here, and on a rank without our layers."""
    config = llm.llm_engine.vllm_config
    core = llm.llm_engine.engine_core.engine_core
    model = type(core.model_executor.driver_worker.worker.model_runner.get_model())
    if not hasattr(model, "get_mamba_specs_from_config"):  # plain vLLM's own
        return {}
    bare = copy.copy(config)
    bare.compilation_config = copy.copy(config.compilation_config)
    bare.compilation_config.static_forward_context = {}
    return {
        name: sorted(s.page_size_bytes for s in model.get_mamba_specs_from_config(asked))
        for name, asked in {"rank": config, "bare": bare}.items()
    }


def spec_metrics(llm: Any) -> dict[str, int]:
    """vLLM's counters of drafts, draft tokens and accepted ones; empty without statistics."""
    try:
        found = llm.get_metrics()
    except AssertionError:
        return {}
    prefix = "vllm:spec_decode_num_"
    named = (m for m in found if m.name.startswith(prefix) and hasattr(m, "value"))
    return {m.name[len(prefix) :]: int(m.value) for m in named}


def ngram_acceptance(job: dict[str, Any]) -> dict[str, int]:
    """What vLLM's own n-gram proposer drafts and gets accepted if the tokens are ``ids``.

    ids hold ``drafts`` tokens more than a request generates.
    """
    import numpy as np
    from vllm.v1.spec_decode.ngram_proposer import (
        _find_longest_matched_ngram_and_propose_tokens as propose,
    )

    found = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    for prompt, ids in zip(job["prompts"], job["ids"], strict=True):
        done, every = 1, np.array([*prompt, *ids], dtype=np.int32)
        while done < job["tokens"]:
            drafted = propose(
                every[: len(prompt) + done], job["min"], job["max"], job["length"], job["drafts"]
            ).tolist()
            kept = 0
            while kept < len(drafted) and drafted[kept] == ids[done + kept]:
                kept += 1
            found["drafts"] += bool(drafted)
            found["draft_tokens"] += len(drafted)
            found["accepted_tokens"] += kept
            done += kept + 1
    return found


def staged(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What a builder plans for steps as a captured graph would replay them, one after the other.

    A step: lengths of its rows, tokens of each with them, blocks, which rows are prompts, and the
    drafts of each (-1: none are looked for); rows of length 0 are padding. ``moved`` puts the step
    into other blocks, as another KV-cache group has them.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backend import CommonAttentionMetadata

    llm = make(job)
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    builders = (g.get_metadata_builder(0) for groups in runner.attn_groups for g in groups)
    builder = next(b for b in builders if hasattr(b, "planner"))
    builder.use_full_cuda_graph = True
    builder.compilation_config.cudagraph_mode = CUDAGraphMode.FULL

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def seen(step: Any) -> dict[str, Any]:
        rows = {
            n: getattr(step.rows, n) for n in ("slots", "fold_slots", "valid", "flush", "count")
        }
        vectors = rows | {"starts": step.starts, "shift": step.shift}
        found = {name: v.tolist() for name, v in vectors.items()}
        found["addresses"] = [v.data_ptr() for v in vectors.values()]
        return found | {"width": step.width, "ragged": step.gather is not None}

    results = []
    for asked in job["steps"]:
        starts, lens = ints([0, *asked["lengths"]]).cumsum(0).to(torch.int32), ints(asked["tokens"])
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=lens,
            seq_lens_cpu_upper_bound=lens.clone(),
            num_reqs=len(lens),
            num_actual_tokens=asked.get("padded", int(starts[-1])),
            max_query_len=max(asked["lengths"]),
            max_seq_len=max(asked["tokens"]),
            block_table_tensor=ints(asked["blocks"])[:, None],
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
            is_prefilling=torch.tensor(asked["prompts"]),
        )
        if asked.get("capture"):
            md = builder.build_for_cudagraph_capture(common)
        else:
            md = builder.build(
                0,
                common,
                num_accepted_tokens=torch.ones_like(lens),
                num_decode_draft_tokens_cpu=ints(asked["drafts"]),
            )
        result: dict[str, Any] = {"verify": None if md.verify is None else seen(md.verify)}
        if md.prefill_rows is not None:
            rows = md.prefill_rows
            result["prefill"] = [rows.slots.tolist(), rows.valid.tolist(), md.roll.tolist()]
        if "moved" in asked:
            table = ints(asked["moved"])[:, None]
            result["moved"] = seen(
                builder.update_block_table(md, table, common.slot_mapping).verify
            )
        results.append(result)
    return results


def signatures() -> dict[str, Any]:
    """Overridden methods that vLLM lacks, or whose parameters ours cannot take."""
    import vllm.plugins  # noqa: F401  (what is there when vLLM calls us)
    from vllm.version import __version__

    from replayssm_quant.backends.vllm import plugin

    before = set(sys.modules)
    plugin.register()
    plugin.register()
    imported = sorted(set(sys.modules) - before)

    from replayssm_quant.backends.vllm import gdn, layer, mamba2, metadata

    ours = [
        (mamba2.SplitMambaMixer2, [layer.SplitLayer, mamba2.SplitMambaMixer2]),
        (gdn.SplitQwenGatedDeltaNet, [layer.SplitLayer, gdn.SplitQwenGatedDeltaNet]),
        (metadata.SplitMamba2Builder, [metadata.SplitMamba2Builder]),
        (metadata.SplitGDNBuilder, [metadata.SplitGDNBuilder]),
        (metadata.SplitMamba2Backend, [metadata.SplitMamba2Backend]),
        (metadata.SplitGDNBackend, [metadata.SplitGDNBackend]),
    ]
    try:  # the V2 model runner needs Triton
        from replayssm_quant.backends.vllm import requests

        ours.append((requests.SplitModelState, [requests.SplitModelState]))
    except ImportError:
        pass
    new = {"split", "make_page", "metadata", "heads", "before", "store", "reserve", "rehearse"}
    private = {
        "_prefill",
        "_decode",
        "_heads",
        "_seed",
        "_batch_keys",
        "_verify",
        "_plan",
        "_alike",
    }
    private |= {"_convolve_drafts", "_forward_drafts", "_plan_verify", "_projections"}
    private |= {"_step", "_verify_step"}
    problems, checked = [], 0
    for cls, sources in ours:
        base = cls.__mro__[cls.__mro__.index(sources[-1]) + 1 :]
        base = next(c for c in base if c not in sources)
        for source in sources:
            for name, value in vars(source).items():
                if not inspect.isfunction(value) or name in new:
                    continue
                stock = getattr(base, name, None)
                if name.startswith("_") and name != "__init__" and stock is None:
                    if name in private:
                        continue
                if stock is None:
                    problems.append(f"{cls.__name__}.{name}: vLLM has no such method")
                    continue
                checked += 1
                mine = inspect.signature(value).parameters
                if any(p.kind == p.VAR_POSITIONAL for p in mine.values()):
                    continue
                theirs = inspect.signature(stock).parameters
                if list(mine)[1:] != [p for p in theirs if p != "self"]:
                    problems.append(f"{cls.__name__}.{name}: {list(mine)} for {list(theirs)}")
    marks = {}
    for patch in plugin.PATCHES:
        module, path = patch.target.split(":")
        owner = __import__(module, fromlist=["x"])
        for part in path.split("."):
            owner = getattr(owner, part)
        marks[patch.target] = times_marked(owner)
    return {
        "version": __version__,
        "problems": problems,
        "checked": checked,
        "marks": marks,
        "imported": imported,
    }


def times_marked(found: Any) -> int:
    """How many of our functions or classes lie one inside the other; of a table, at the deepest."""
    if isinstance(found, dict):
        return max(sum(MARK in vars(c) for c in cls.__mro__) for cls in found.values())
    count = 0
    while found is not None:
        count += MARK in vars(found)
        found = getattr(found, "__wrapped__", None)
    return count


def main() -> None:
    job, out = Path(sys.argv[1]), Path(sys.argv[2])
    if job.name == "signatures":
        out.write_text(json.dumps(signatures()))
        return
    asked = json.loads(job.read_text())
    if isinstance(asked, dict):
        found = staged(asked) if "steps" in asked else ngram_acceptance(asked)
        out.write_text(json.dumps(found))
        return
    log: dict[str, Any] = {}
    watch(log)
    results = {}
    for scenario in asked:
        try:
            results[scenario["name"]] = run(scenario, log, results)
        except Exception as error:
            results[scenario["name"]] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        out.with_suffix(".part").write_text(json.dumps(results))
        out.with_suffix(".part").replace(out)


if __name__ == "__main__":
    main()
