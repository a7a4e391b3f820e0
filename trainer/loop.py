"""The training loop. `Trainer.run` is its table of contents."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from vllm_lilicorr.errors import UserError, nearest
from vllm_lilicorr.io import write_file_atomically
from vllm_lilicorr.model import Draft
from vllm_lilicorr.target import load_target

from . import checkpoints
from .config import TrainConfig, completed, identity
from .corpus import Corpus, Origin
from .data import Batch, Schedule, collate, draw_anchors, split
from .evaluation import Evaluator
from .export import export_engine
from .metrics import MetricsLog, peak_memory_bytes
from .objectives import OBJECTIVES, Objective, Terms
from .optim import build_optimizer, learning_rate
from .settings import digest, to_yaml
from .states import CachedStates, OnlineStates, StateSource, load_vocabulary, read_target_config
from .vocabulary import SampledVocabulary
from .warmstart import warm_start

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Trainer:
    """One run on this rank, from its configuration to its export."""

    def __init__(self, config: TrainConfig, skip_nonfinite: int = 0) -> None:
        self.config, self.nonfinite_left = config, skip_nonfinite
        self.output = Path(config.run.output)
        self.device = _join_ranks()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.accumulation = _accumulation(config, self.world)
        self.origin = Origin.of(config.target.path)
        self.corpus = Corpus(config.data.path)
        self.corpus.origin.check(self.origin, f"the corpus in {config.data.path}")
        train, held_out, self.left_out = split(self.corpus, config.data)
        self.schedule = Schedule(train, config.run.batch_size, config.run.seed)
        self.max_steps = config.run.max_steps or self.schedule.steps_per_epoch * config.run.epochs
        self.draft = self._build_draft()
        self.states = self._open_states()
        self.evaluator = Evaluator(
            self.corpus, held_out, self.states, config.data.max_length, self.draft.config.num_slots, config.evaluation
        )
        if config.data.mode == "offline":
            self.evaluator.prepare()  # what the cache lacks is better said now than after the last step
        self.universal = self._begins_universal()
        self.objective, self.engine = self._build_engine(train)
        self.step = self._resume()
        self.log = self._open_log() if self.rank == 0 else None
        self._signalled = False

    # What happens, in order.

    def run(self) -> None:
        """Train to the end (or `run.stop_after`, or a signal), evaluate, export."""
        stop = min(self.max_steps, self.config.run.stop_after or self.max_steps)
        with _signals(self):
            while self.step < stop:
                values, interrupted = self.train_step()
                self.step += 1
                if self.log:
                    self.log.step(values)
                last = self.step == stop
                if self._due(self.config.run.save_every) or last or interrupted:
                    self.save()
                if interrupted and not last:
                    self._say(f"stopped by a signal after step {self.step}; the same command continues")
                    return
                if self._due(self.config.evaluation.every) and not last:
                    self.evaluate(everything=False)
        if len(self.evaluator.held_out):
            self.evaluate(everything=True)
        export_engine(self.engine, self.draft, self.output / "export")
        self._say(f"step {self.step} of {self.max_steps}: exported to {self.output / 'export'}")

    def train_step(self) -> tuple[dict[str, Any], bool]:
        """Take one optimizer step; return its logged values and whether a signal asks to stop."""
        began = time.perf_counter()
        lr = learning_rate(self.step, self.max_steps, self.config.optimizer.lr, self.config.schedule)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        epoch, conversations = self.schedule.batch(self.step)
        logged: list[dict[str, float]] = []
        counts = np.zeros(3)
        for micro in range(self.accumulation):
            batch = self._batch(epoch, conversations, micro)
            terms: Terms = self.engine(batch.to(self.device), self.step)
            values, summed = self._reduce(terms, batch)
            self._require_finite(values, batch)
            self.engine.backward(terms[0])
            self.engine.step()
            logged.append(values)
            counts += summed
        values = {key: sum(entry[key] for entry in logged) / len(logged) for key in logged[0]}
        norm = self._gradient_norm(batch)
        seconds = time.perf_counter() - began
        return {
            "step": self.step + 1,
            "epoch": epoch,
            **values,
            "lr": lr,
            "grad_norm": norm,
            "tokens_per_s": counts[0] / seconds,
            "blocks_per_s": counts[1] / seconds,
            "seconds": seconds,
            "memory_bytes": peak_memory_bytes(self.device),
        }, counts[2] > 0

    def evaluate(self, everything: bool) -> None:
        """Measure the acceptance length on held-out conversations."""
        began = time.perf_counter()
        results = self.evaluator.run(self.objective, self.device, everything)
        if self.log:
            values: dict[str, Any] = {"step": self.step, "evaluation_seconds": time.perf_counter() - began}
            for rule, result in results.items():
                values |= {f"tau_{rule}": result.tau, f"accepted_{rule}": result.accepted, f"blocks_{rule}": result.blocks}
            self.log.evaluation(values)

    def save(self) -> None:
        """Write a checkpoint of the state after `self.step` steps."""
        state = {
            "step": self.step,
            "world_size": self.world,
            "config_hash": self.config.hash(),
            "config": self.config.resolved(),
            "corpus": self.corpus.fingerprint,
        }
        checkpoints.save(self.engine, self.output / "checkpoints", self.step, state, self.config.run.keep_last)

    # How each part is made.

    def _build_draft(self) -> Draft:
        run = self.config.run
        config = self.config.draft_config(
            read_target_config(self.config.target.path), self.origin.target_name, self.origin.tokenizer_hash
        )
        # Backbone before head: arms with different heads start from the same backbone, and so do arms with a convolution,
        # which is the identity at first and must not shift the draws of what follows it.
        torch.manual_seed(run.seed)
        draft = Draft(replace(config, conv=None))
        if config.conv is not None:
            plain, draft = draft.state_dict(), Draft(config)
            draft.load_state_dict(plain, strict=False)
        if run.warm_start:
            parts = warm_start(draft, run.warm_start)
            if self.rank == 0:
                print(f"warm start from {run.warm_start}: {' and '.join(parts)}")
        draft.backbone.requires_grad_(not self.config.draft.freeze_backbone)
        for name in self.config.draft.without:
            _hold_at_zero(draft.head, name)
        if run.activation_checkpointing:
            for layer in (*draft.backbone.layers, *getattr(draft.head, "layers", ())):
                layer.forward = _recomputed(layer.forward)
        return draft

    def _open_states(self) -> StateSource:
        data, layers = self.config.data, self.draft.config.target_layer_ids
        if data.mode == "offline":
            cache = data.cache or str(Path(data.path) / "states")
            return CachedStates(cache, self.corpus, self.origin, layers, data.max_length)
        target = load_target(self.config.target.path, layers, DTYPES[self.config.run.precision], self.device)
        if data.target_zero:
            _partition(target.model, self.config.run.precision)
        return OnlineStates(target, partitioned=data.target_zero)

    def _build_engine(self, train: np.ndarray) -> tuple[Objective, Any]:
        config, dtype = self.config, DTYPES[self.config.run.precision]
        target = load_vocabulary(config.target.path, dtype, self.device)
        sampled = None
        if config.objective.train_vocab is not None:
            sampled = SampledVocabulary(self._corpus_tokens(train), target.lm_head, config.objective.train_vocab, config.run.seed)
        objective = OBJECTIVES[config.draft.head](self.draft, config.objective, target, sampled, self.max_steps)
        settings = _deepspeed_settings(config, self.accumulation, self.world)
        if self.universal:
            settings["checkpoint"] = settings.get("checkpoint", {}) | {"load_universal": True}
        engine, *_ = deepspeed.initialize(
            model=objective,
            optimizer=build_optimizer((p for p in objective.parameters() if p.requires_grad), config.optimizer, settings),
            config=settings,
        )
        # DeepSpeed checks gradients for overflow in half precision only; a NaN is as fatal in fp32.
        if hasattr(engine.optimizer, "check_grad_overflow"):
            engine.optimizer.check_grad_overflow = True
        if engine.zero_optimization_stage() == 0 and config.run.precision == "bf16":
            # DeepSpeed allocates this optimizer's moments by a step on zero gradients, which Adam's bias correction would
            # count as the first one.
            engine.basic_optimizer.state.clear()
        if engine.zero_optimization_stage() == 3:
            for parameter in objective.outside_parameters():
                deepspeed.zero.register_external_parameter(objective, parameter)
        engine.train()
        return objective, engine

    def _corpus_tokens(self, train: np.ndarray) -> np.ndarray:
        seen = np.zeros(self.draft.config.vocab_size, bool)
        for index in train:
            conversation = self.corpus[int(index)]
            for start, end in conversation.spans:
                seen[conversation.ids[start : min(end, self.config.data.max_length)]] = True
        return np.flatnonzero(seen)

    def _resume(self) -> int:
        """Return the step of the checkpoint in force (0 without one), having restored it."""
        folder = self.output / "checkpoints"
        name = checkpoints.latest(folder)
        if name is None:
            if self.rank == 0:
                self._describe()
            dist.barrier()
            return 0
        saved = checkpoints.read_state(folder, name)
        self._check_resumable(folder / name, saved)
        checkpoints.load(self.engine, folder, name)
        return saved["step"]

    def _check_resumable(self, path: Path, saved: dict[str, Any]) -> None:
        there = identity(completed(saved["config"], str(path)))
        if digest(there) != self.config.hash():
            differing = _differences(there, identity(self.config.resolved()))
            raise UserError(
                f"{path}: belongs to another configuration ({'; '.join(differing[:4])}); give those values "
                "back, or another run.output"
            )
        if saved["corpus"] != self.corpus.fingerprint:
            raise UserError(f"{path}: was trained on another corpus than {self.config.data.path}; give another run.output")
        if saved["world_size"] != self.world and not self.universal:
            raise UserError(
                f"{path}: was written by {saved['world_size']} ranks and this run has {self.world}; start {saved['world_size']}, "
                "or convert it with 'python -m deepspeed.checkpoint.ds_to_universal' and set deepspeed.universal=true "
                "(docs/training.md, Resuming)"
            )

    def _begins_universal(self) -> bool:
        """Return whether the checkpoint in force is a converted one: what the run saves after it is of the usual kind again."""
        folder = self.output / "checkpoints"
        name = checkpoints.latest(folder)
        found = name is not None and checkpoints.is_universal(folder, name)
        if found and not self.config.deepspeed.universal:
            raise UserError(f"{folder}/{name}: is in the universal format; set deepspeed.universal=true to resume from it")
        return found

    def _describe(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        write_file_atomically(self.output / "config.yaml", f"{to_yaml(self.config)}# hash: {self.config.hash()}\n")
        write_file_atomically(self.output / "draft.json", self.draft.config.to_json())

    def _open_log(self) -> MetricsLog:
        run = self.config.run
        log = MetricsLog(self.output, self.step, self.max_steps, run.tensorboard, run.wandb, self.config.resolved())
        if self.step:
            log.note(f"resumed after step {self.step}")
        if self.left_out:
            log.note(f"{self.left_out} conversations have no answer inside data.max_length and are left out")
        return log

    # One micro-step's parts.

    def _batch(self, epoch: int, conversations: np.ndarray, micro: int) -> Batch:
        """Return this rank's share of a micro-step: the step's conversations are dealt micro-step by micro-step."""
        config = self.config
        size = config.run.micro_batch_size
        first = (micro * self.world + self.rank) * size
        indices = [int(index) for index in conversations[first : first + size]]
        rows = [self.corpus[index] for index in indices]
        length = config.data.max_length
        anchors = [draw_anchors(config.run.seed, epoch, row, min(len(row.ids), length), config.data.anchors) for row in rows]
        return collate(rows, anchors, self.states.of(indices, rows, length), length)

    def _reduce(self, terms: Terms, batch: Batch) -> tuple[dict[str, float], np.ndarray]:
        """Return the micro-step's values over all ranks, and (tokens, blocks, ranks that were signalled) summed over them."""
        rank_loss, rank_sums = terms
        pairs = [value.float() for pair in rank_sums.values() for value in pair]
        counts = torch.tensor([float(batch.lengths.sum()), float(batch.valid.sum()), float(self._signalled)])
        table = torch.cat((torch.stack([rank_loss.detach().float(), *pairs]), counts.to(self.device)))
        dist.all_reduce(table)
        loss, *sums = table.tolist()
        values = {name: sums[2 * i] / sums[2 * i + 1] if sums[2 * i + 1] else sums[2 * i] for i, name in enumerate(rank_sums)}
        values = {"loss": loss / self.world, **values}
        self._check_identity(values)
        return values, np.array(sums[-3:])

    def _check_identity(self, values: dict[str, float]) -> None:
        """The loss that is differentiated is the sum of the terms that are logged."""
        total = sum(weight * values[name] for name, weight in self.objective.weights(self.step).items())
        if math.isfinite(total) and abs(total - values["loss"]) > 1e-4 * max(1.0, abs(total)):
            raise RuntimeError(f"the loss {values['loss']} is not the sum of its terms {total}")

    def _require_finite(self, values: dict[str, float], batch: Batch) -> None:
        bad = [name for name in (*self.objective.weights(self.step), "loss") if not math.isfinite(values[name])]
        if bad:
            self._nonfinite(f"loss term {bad[0]} is {values[bad[0]]}", batch)

    def _gradient_norm(self, batch: Batch) -> float:
        """Return the step's gradient norm before clipping; a step whose gradient is not finite was not taken."""
        norm = float(self.engine.get_global_grad_norm() or 0.0)
        if getattr(self.engine.optimizer, "overflow", False) or not math.isfinite(norm):
            self._nonfinite("the gradient is not finite", batch)
            norm = float("nan")
        self._tolerated = False
        return norm

    _tolerated = False
    """Whether this step has been found not finite, and let pass, already."""

    def _nonfinite(self, what: str, batch: Batch) -> None:
        if self._tolerated:
            return
        names: list[Any] = [None] * self.world
        dist.all_gather_object(names, list(batch.names))
        ids = ", ".join(name for part in names for name in part)
        if self.nonfinite_left <= 0:
            raise UserError(
                f"step {self.step + 1}: {what}, on conversations {ids}; the last checkpoint is intact, look at these "
                "conversations, lower optimizer.lr, or tolerate it with --skip-nonfinite"
            )
        self.nonfinite_left -= 1
        self._tolerated = True
        self._say(f"step {self.step + 1} is skipped: {what}, on conversations {ids}")

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _say(self, text: str) -> None:
        if self.log:
            self.log.note(text)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.log:
            self.log.close()


def _join_ranks() -> torch.device:
    """Join the launcher's process group, or make one of a single rank, and return this rank's device."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Compiled at first use, for minutes, and used by inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    local = int(os.environ["LOCAL_RANK"])
    accelerator.set_device(local)
    return torch.device(accelerator.device_name(local))


def _accumulation(config: TrainConfig, world: int) -> int:
    run = config.run
    together = run.micro_batch_size * world
    if run.batch_size % together:
        raise UserError(
            f"run.batch_size: {run.batch_size} is no multiple of micro_batch_size {run.micro_batch_size} x {world} ranks; choose "
            "sizes that divide it"
        )
    return run.batch_size // together


def _deepspeed_settings(config: TrainConfig, accumulation: int, world: int) -> dict[str, Any]:
    settings = config.deepspeed_json() | {
        "train_batch_size": config.run.batch_size,
        "train_micro_batch_size_per_gpu": config.run.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optimizer.clip,
        "steps_per_print": 1 << 30,
    }
    if config.run.precision == "bf16":
        settings["bf16"] = settings.get("bf16", {}) | {"enabled": True, "check_grad_overflow": True}
    return settings


def _partition(model: Any, precision: str) -> None:
    """Partition a frozen model over the ranks (ZeRO stage 3 without an optimizer): a layer is gathered while it runs, so
    all ranks must run it together."""
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    if precision == "bf16":
        settings["bf16"] = {"enabled": True}
    deepspeed.initialize(model=model, config=settings)


def _hold_at_zero(head: torch.nn.Module, name: str) -> None:
    """Set a layer or table of the head to zero and leave it untrained; raises UserError where the head has none of that name."""
    held = {path: p for path, p in head.named_parameters() if f"{path}.".startswith(f"{name}.")}
    if not held:
        parts = sorted({path.partition(".")[0] for path, _ in head.named_parameters()})
        hint = nearest(name, parts) or f"; it has {', '.join(parts) or 'no weights'}"
        raise UserError(f"draft.without: this head has no '{name}' to leave out{hint}")
    for parameter in held.values():
        torch.nn.init.zeros_(parameter.requires_grad_(False))


def _recomputed(forward: Any) -> Any:
    """Return `forward` with its activations recomputed in the backward pass."""

    def run(*arguments: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False)

    return run


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} was {json.dumps(a)}, is {json.dumps(b)}")
    return found


class _signals:
    """Inside, Ctrl-C and SIGTERM ask for a stop after the current step; a second Ctrl-C is Python's own."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __enter__(self) -> None:
        self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}

    def _ask(self, number: int, frame: Any) -> None:
        if self.trainer._signalled and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.trainer._signalled = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
