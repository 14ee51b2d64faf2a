"""lm-evaluation-harness tasks in our runner: names, local data files, one unit of a task.

Tasks are found by reading the YAML files of the installed lm-eval, without loading any of them.
Data come from ``--data-dir``: ``TASK/SPLIT.parquet`` (or .jsonl, .json; ``SPLIT-*.parquet`` for
shards), or ``TASK.parquet`` for a task that needs one split. Nothing is downloaded unless asked.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import io
import json
import logging
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import yaml

from . import data, data_ruler
from .arms import Arm
from .probes import digest_of, short_hash
from .schema import UnitRecord
from .store import Unit
from .suite import SuiteError, TaskSpec

if TYPE_CHECKING:
    from ..models import LoadedModel
    from .measure import Options

SUFFIXES = (".parquet", ".jsonl", ".json")
PREFERRED_FILTERS = ("flexible-extract", "strict-match")
SHARE_METRICS = ("exact_match", "acc", "acc_norm", "f1", "em", "accuracy")
RUNS_NOTHING = re.compile(r"longproc_(path_traversal|tom_tracking|html_to_tsv|travel_planning)_")
"""Tasks that lm-eval marks as running code for the sake of others in their folder."""
PROMPT_ROOM = 1024
"""Tokens to spare, for models whose configuration names no length."""
CHAT_ROOM = 256
"""Tokens that a chat template may add to a prompt."""
MAX_TOKENS = 256
"""Tokens of an answer where a task names no limit, as in lm-eval's own models."""
REPEAT_SEED = 1000
"""Apart from each other: the rounding seeds of an answer's repeats."""
EXTRA = "lm-eval tasks need the eval extra: pip install 'replayssm-quant[eval]'"
_TASK = re.compile(r"^task:[ \t]*([^\s#\[{][^\n#]*?)[ \t]*(?:#.*)?$", re.MULTILINE)


class _Loader(yaml.SafeLoader):
    """Reads ``!function module.name`` as text: nothing is imported."""


_Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


@functools.lru_cache(maxsize=1)
def task_files() -> dict[str, Path] | None:
    """YAML file of each single task of the installed lm-eval; None if it is not installed."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        return None
    found: dict[str, Path] = {}
    for path in sorted((Path(spec.submodule_search_locations[0]) / "tasks").rglob("*.yaml")):
        match = _TASK.search(path.read_text(encoding="utf-8", errors="replace"))
        if match:
            found.setdefault(match[1].strip("'\""), path)
    return found


def task_names() -> list[str] | None:
    """Names of lm-eval's tasks; None if it is not installed."""
    files = task_files()
    return None if files is None else sorted([*files, *data_ruler.NAMES])


def read_config(path: Path) -> dict[str, Any]:
    """A task's settings with its ``include`` files merged in; functions stay text."""
    data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader) or {}  # noqa: S506 (safe)
    parents = data.pop("include", [])
    merged: dict[str, Any] = {}
    for name in [parents] if isinstance(parents, str) else parents:
        merged |= read_config((path.parent / name).resolve())
    return merged | data


@dataclass(frozen=True)
class TaskInfo:
    """What the runner must know of an lm-eval task before it is loaded."""

    name: str
    file: Path
    data: str | None
    output_type: str
    evaluated: str
    fewshot: str | None
    metric: str
    filter: str | None


def _info(name: str) -> TaskInfo:
    if name in data_ruler.NAMES:
        source = Path(data_ruler.__file__)
        return TaskInfo(name, source, None, "generate_until", "test", None, "exact_match", "none")
    files = task_files()
    if files is None:
        raise SuiteError(f"task '{name}': {EXTRA}")
    if name not in files:
        near = difflib.get_close_matches(name, list(files), 1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise SuiteError(f"unknown lm-eval task '{name}': {hint}`lm-eval ls tasks` lists them")
    config = read_config(files[name])
    output = str(config.get("output_type", "generate_until"))
    metrics = [m["metric"] for m in config.get("metric_list", []) if isinstance(m, dict)]
    metric = next((m for m in SHARE_METRICS if m in metrics), None)
    if not metrics and output == "multiple_choice":
        metric = "acc"
    if metric is None:
        listed = ", ".join(map(str, metrics)) or "metrics of its own"
        raise SuiteError(
            f"task '{name}' reports {listed}, none of which is a share per question "
            f"({', '.join(SHARE_METRICS)}); for likelihoods use the local task text"
        )
    filters = [f["name"] for f in config.get("filter_list", []) or []]
    chosen = next((f for f in PREFERRED_FILTERS if f in filters), filters[0] if filters else "none")
    split = config.get("test_split") or config.get("validation_split")
    if split is None:
        raise SuiteError(f"task '{name}' has no split to evaluate; choose another task")
    shots = int(config.get("num_fewshot") or 0)
    samples = (config.get("fewshot_config") or {}).get("samples")
    fewshot = None
    if shots and samples is None:
        fewshot = config.get("fewshot_split") or config.get("training_split") or split
    if config.get("unsafe_code") and not RUNS_NOTHING.match(name):
        raise SuiteError(f"task '{name}' runs code that the model writes; it is not supported here")
    source = config.get("dataset_path")
    return TaskInfo(name, files[name], source, output, split, fewshot, metric, chosen)


@functools.lru_cache(maxsize=64)
def task_info(name: str) -> TaskInfo:
    """Data set, splits, metric and filter of a task. Raises SuiteError with the remedy."""
    return _info(name)


def find_data(info: TaskInfo, folder: Path) -> dict[str, list[str]]:
    """Local files of each split that the task needs. Raises SuiteError naming what is missing."""
    needed = list(dict.fromkeys(s for s in (info.evaluated, info.fewshot) if s))
    out: dict[str, list[str]] = {}
    for split in needed:
        found: list[Path] = []
        for suffix in SUFFIXES:
            found = sorted((folder / info.name).glob(f"{split}{suffix}"))
            found = found or sorted((folder / info.name).glob(f"{split}-*{suffix}"))
            if not found and len(needed) == 1:
                found = sorted(folder.glob(f"{info.name}{suffix}"))
            if found:
                break
        if not found:
            use = "questions" if split == info.evaluated else "examples"
            raise SuiteError(
                f"task '{info.name}' takes its {use} from split '{split}' of {info.data}: put it "
                f"into {folder / info.name / split}.parquet (or .jsonl)"
            )
        out[split] = [str(p.resolve()) for p in found]
    return out


def data_digest(name: str, folder: Path | None) -> str:
    """Digest over the task's local files; empty where its data come from elsewhere."""
    if folder is None or name in data_ruler.NAMES:
        return ""
    parts = []
    for split, files in sorted(find_data(task_info(name), folder).items()):
        for file in files:
            parts.append(f"{split}:{short_hash(Path(file).read_bytes())}")
    return short_hash(*parts)


def check_tasks(specs: Sequence[TaskSpec], folder: Path | None, download: bool) -> None:
    """Refuse tasks whose data are neither local nor allowed to be fetched, whose files lack a
    column, or that decode nothing. Raises SuiteError."""
    for spec in specs:
        info = task_info(spec.task)
        if info.output_type != "generate_until" and not spec.stepwise:
            raise SuiteError(
                f"task '{spec.task}' compares likelihoods of given answers: a served model reads "
                "them in its prefill and decodes nothing, so the score says nothing about a "
                "decode state; use a task that generates (gsm8k, hendrycks_math500), or set "
                "stepwise: true in a suite to score its text as decode steps"
            )
        if spec.task in data_ruler.NAMES:
            continue
        if folder is not None:
            for files in find_data(info, folder).values():
                try:
                    data.check(spec.task, info.data, files)
                except data.DataError as error:
                    raise SuiteError(str(error)) from None
        elif not download and info.data is not None:
            raise SuiteError(
                f"task '{spec.task}' reads {info.data} from the network; give --data-dir with "
                "local files, or --download-data"
            )


def card_sampling(location: str) -> dict[str, Any]:
    """Sampling settings of a model folder's generation_config.json; empty where it samples none."""
    path = Path(location) / "generation_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not found.get("do_sample"):
        return {}
    names = ("temperature", "top_p", "top_k")
    return {"temperature": 1.0} | {k: found[k] for k in names if found.get(k) is not None}


@contextlib.contextmanager
def _quiet_lm_eval() -> Any:
    """lm-eval and datasets say nothing below errors, and draw no progress bars."""
    loggers = [logging.getLogger(n) for n in ("lm_eval", "datasets")]
    levels = [x.level for x in loggers]
    for x in loggers:
        x.setLevel(logging.ERROR)
    # it asks git for a commit, which complains on the terminal where there is no repository
    silent = mock.patch("lm_eval.evaluator.get_git_commit_hash", return_value=None)
    # and lists what is installed for every result, by subprocesses that take more than a second
    brief = mock.patch("lm_eval.evaluator.add_env_info")
    try:
        with contextlib.redirect_stderr(io.StringIO()), silent, brief:
            yield
    finally:
        for x, level in zip(loggers, levels, strict=True):
            x.setLevel(level)


def _seed() -> None:
    """The state in which tasks draw (GPQA shuffles its choices with Python's own generator): the
    same as ``simple_evaluate`` sets, so that every run asks the same questions."""
    random.seed(0)
    np.random.seed(0)


class TaskRunner:
    """One lm-eval task, loaded once, so that every arm is asked the same questions."""

    def __init__(
        self,
        spec: TaskSpec,
        folder: Path | None,
        limit: int | None,
        tokenizer: Any = None,
        max_gen_toks: int | None = None,
    ):
        if folder is not None:
            # Read when datasets is imported; local files need no network.
            os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
        from lm_eval.tasks import TaskManager

        name = spec.task
        self.spec, self.info, self.limit = spec, task_info(name), limit
        self.files: dict[str, list[str]] = {}
        self.chat = spec.chat and getattr(tokenizer, "chat_template", None) is not None
        # the folder of the model: a tokenizer knows where it came from
        self.generation = self._generation(getattr(tokenizer, "name_or_path", ""))
        change: dict[str, Any] = {"task": name}
        if name in data_ruler.NAMES:
            change = self._ruler(tokenizer)
        elif folder is not None:
            self.files = find_data(self.info, folder)
            suffix = Path(next(iter(self.files.values()))[0]).suffix
            change |= {
                "dataset_path": "parquet" if suffix == ".parquet" else "json",
                "dataset_name": None,
                "dataset_kwargs": {"data_files": self.files},
            }
            # splits that are not needed need not be there
            config = read_config(self.info.file)
            for role in ("training_split", "validation_split", "test_split", "fewshot_split"):
                if config.get(role) is not None and config[role] not in self.files:
                    change[role] = None
        if (
            name == "hendrycks_math500"
        ):  # its own scoring overlooks boxed answers, aime's takes both
            from lm_eval.tasks.aime.utils import process_results

            change["process_results"] = process_results
        with _quiet_lm_eval(), self._readable():
            import datasets

            datasets.disable_progress_bars()
            datasets.disable_caching()  # it would freeze what a task drew from the global generator
            _seed()
            if name in data_ruler.NAMES:
                self.manager = TaskManager(include_defaults=False)
                listed: Any = change
            else:
                self.manager = TaskManager(
                    include_path=str(self.info.file.parent), include_defaults=False
                )
                # a group around the task inherits its settings; a bare dict would replace them
                listed = {"group": f"local-{name}", "task": [change]}
            self.task = self.manager.load([listed])["tasks"][name]
        if max_gen_toks is not None and self.info.output_type == "generate_until":
            own = self.task.config.generation_kwargs or {}
            asked = self.generation.get("max_gen_toks", own.get("max_gen_toks", max_gen_toks))
            self.generation["max_gen_toks"] = min(int(asked), max_gen_toks)
        self.check()

    @property
    def think_end(self) -> str | None:
        return None if self.spec.generation is None else self.spec.generation.think_end

    def _generation(self, location: str) -> dict[str, Any]:
        """What replaces the task's own generation settings."""
        asked = self.spec.generation
        if asked is None:
            return {}
        out: dict[str, Any] = {}
        names = ("temperature", "top_p", "top_k")
        drawn = {k: getattr(asked, k) for k in names if getattr(asked, k) is not None}
        if asked.card:
            drawn = card_sampling(location) or drawn
        if drawn:
            sampled = drawn.get("temperature", 1.0) > 0
            out = {"do_sample": sampled, "temperature": drawn.get("temperature", 1.0)}
            if sampled:  # transformers would draw among 50 tokens unless told otherwise
                out |= {"top_p": drawn.get("top_p", 1.0), "top_k": drawn.get("top_k", 0)}
        if self.spec.repeats > 1 and not out.get("do_sample"):
            raise SuiteError(
                f"task '{self.spec.name}': {self.spec.repeats} greedy answers are one answer "
                f"{self.spec.repeats} times, and the model's generation_config.json samples "
                "nothing; set generation.temperature"
            )
        if asked.max_gen_toks is not None:
            out["max_gen_toks"] = asked.max_gen_toks
        return out

    def _ruler(self, tokenizer: Any) -> dict[str, Any]:
        """The configuration of a task that is made here."""
        lengths = self.spec.settings.get("lengths", data_ruler.LENGTHS)
        number = self.limit or 32

        def count(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False)["input_ids"])

        # the limit counts questions of all lengths together, so each length has its share
        share = -(-number // len(lengths))
        try:
            rows = data_ruler.documents(self.spec.task, share, lengths, count)
        except ValueError as error:
            raise SuiteError(str(error)) from None
        rows = [rows[i + j * share] for i in range(share) for j in range(len(lengths))]
        return data_ruler.config(self.spec.task, rows)

    def seed_of(self, seed: int, repeat: int) -> int:
        """Rounding seed of one repeat of an arm's seed."""
        return seed + REPEAT_SEED * repeat

    @contextlib.contextmanager
    def _readable(self) -> Any:
        """Turn what a file of the wrong shape raises into one line."""
        try:
            yield
        except SuiteError:
            raise
        except Exception as error:
            columns, where = "", f"from {self.info.data}"
            if self.files:
                where = "in " + ", ".join(Path(f).name for fs in self.files.values() for f in fs)
                have = data.columns(Path(self.files[self.info.evaluated][0]))
                columns = f"; its columns: {', '.join(have)}"
            line = " ".join(str(error).split())[:160]
            raise SuiteError(
                f"task '{self.info.name}': the data {where} do not fit the task ({line}){columns}; "
                f"give files with the columns of {self.info.data}"
            ) from None

    def check(self) -> None:
        """Build the questions once. Raises SuiteError where the data do not fit the task."""
        with _quiet_lm_eval(), self._readable():
            _seed()
            self.task.build_all_requests(limit=self.limit, rank=0, world_size=1)

    def room(self, loaded: LoadedModel) -> int:
        """Tokens of the longest prompt and its answer that the model must hold, or that it does
        hold where its configuration says so.

        Raises SuiteError where they do not fit: lm-eval would cut the prompt and say nothing.
        """
        own = self.task.config.generation_kwargs or {}
        answer = int(self.generation.get("max_gen_toks", own.get("max_gen_toks", MAX_TOKENS)))
        longest = max(
            len(loaded.tokenizer(str(request.args[0]), add_special_tokens=False)["input_ids"])
            for request in self.task.instances
        )
        longest += CHAT_ROOM if self.chat else 1
        text = loaded.model.config.get_text_config(decoder=True)
        held = getattr(text, "max_position_embeddings", None)
        if held is None:
            return longest + answer + PROMPT_ROOM
        if longest + answer > held:
            remedy = "lower generation.max_gen_toks, or give --max-gen-toks"
            if longest >= held:
                remedy = "leave it out, or ask for shorter prompts"
                if self.spec.task in data_ruler.NAMES:
                    remedy = "lower its lengths in a copy of the suite, or leave it out (--tasks)"
            raise SuiteError(
                f"task '{self.spec.name}': prompts of up to {longest} tokens and answers of "
                f"{answer}, but {loaded.resolved.name} holds {held}; {remedy}"
            )
        return int(held)

    def measure(self, loaded: LoadedModel, one: Arm, seed: int, options: Options, key: str) -> Unit:
        """One arm and rounding seed on the task. Raises MeasureError or SuiteError."""
        from .lm import ReplayLM

        batch = one.batch_size or options.batch_size
        extra: dict[str, Any] = {}
        if self.info.output_type == "generate_until":
            extra["max_length"] = self.room(loaded)
        if self.think_end is not None:
            extra["think_end_token"] = self.think_end

        def make(repeat: int) -> ReplayLM:
            with _quiet_lm_eval():
                lm = ReplayLM(
                    loaded.model,
                    tokenizer=loaded.tokenizer,
                    config=one.seeded(self.seed_of(seed, repeat)),
                    prefill=options.prefill,
                    path=options.path,
                    sampling_seed=repeat,
                    batch_size=batch,
                    **extra,
                )
            lm.quiet = True
            return lm

        return self.measure_with(make, loaded.resolved.name, one, seed, key, options.path)

    def _rows(self, lm: Any, repeat: int) -> list[dict[str, Any]]:
        """lm-eval's samples of one pass over the questions."""
        from lm_eval import simple_evaluate

        with _quiet_lm_eval():
            found = simple_evaluate(
                model=lm,
                tasks=[self.task],
                task_manager=self.manager,
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=True,
                gen_kwargs=dict(self.generation) or None,
                apply_chat_template=self.chat,
                confirm_run_unsafe_code=RUNS_NOTHING.match(self.info.name) is not None,
                random_seed=0,
                numpy_random_seed=0,
                torch_random_seed=repeat,
                fewshot_random_seed=0,
            )
        info = self.info
        rows = [s for s in found["samples"][info.name] if s["filter"] == info.filter]
        if not rows:
            filters = sorted({s["filter"] for s in found["samples"][info.name]})
            raise SuiteError(f"task '{info.name}' gave no answers under '{info.filter}': {filters}")
        return sorted(rows, key=lambda r: r["doc_id"])

    def measure_with(
        self, make: Callable[[int], Any], model: str, one: Arm, seed: int, key: str, path: str
    ) -> Unit:
        """One unit of the task: every question ``spec.repeats`` times, its answers together.

        make(repeat): an lm-eval model that counts what it does as ``ReplayLM``; path: how given
        text is scored. Raises MeasureError or SuiteError.
        """
        from .measure import add_counts, check_exercised, exercise

        began = time.perf_counter()
        info, repeats = self.info, self.spec.repeats
        generates = info.output_type == "generate_until"
        counts: dict[int, dict[str, int]] = {}
        scored = decoded = tokens = 0
        samples: list[dict[str, Any]] = []
        for repeat in range(repeats):
            lm = make(repeat)
            rows = self._rows(lm, repeat)
            add_counts(counts, lm.counts)
            scored += lm.generated if generates else lm.scored
            decoded += lm.generated if generates else lm.decoded
            tokens += lm.generated
            for i, row in enumerate(rows):
                value = float(row[info.metric])
                flag = "1" if value >= 0.5 else "0"
                if repeat == 0:
                    sample: dict[str, Any] = {
                        "doc_id": row["doc_id"],
                        "doc_hash": short_hash(str(row["doc_id"]), row["doc_hash"]),
                        "prompt_hash": short_hash(row["prompt_hash"]),
                        "target_hash": short_hash(row["target_hash"]),
                        "answers": repeats,
                        "right": 0.0,
                        "flags": "",
                        "target": str(row["target"]),
                    }
                    if generates:
                        sample |= {"repeats": repeats, "generated": 0, "finished": 0}
                        sample["output"] = str(row["resps"][0][0])
                        answer = json.dumps(row["filtered_resps"][0], default=str)
                        sample["answer"] = answer
                        if repeats > 1:
                            sample["outputs"] = []
                    else:
                        sample["loglikelihoods"] = [float(r[0][0]) for r in row["resps"]]
                    samples.append(sample)
                samples[i]["right"] += value
                samples[i]["flags"] += flag
                if generates:
                    length, ended = lm.lengths[row["arguments"][0][0]].pop(0)
                    samples[i]["generated"] += length
                    samples[i]["finished"] += int(ended)
                if generates and repeats > 1:
                    samples[i]["outputs"].append(str(row["resps"][0][0]))
        used = exercise(
            counts, len(samples) * repeats, scored, decoded, "decode" if generates else path
        )
        check_exercised(one, used, f"{model}, {self.spec.name}, {one.label}")
        answers = len(samples) * repeats
        record = UnitRecord(
            key=key,
            model=model,
            task=self.spec.name,
            arm=one.name,
            seed=seed,
            documents=len(samples),
            answers=answers,
            prompts=digest_of([s["prompt_hash"] for s in samples]),
            accuracy=sum(s["right"] for s in samples) / answers,
            tokens_generated=tokens,
            exercise=used,
            seconds=time.perf_counter() - began,
        )
        return Unit(record, samples)
