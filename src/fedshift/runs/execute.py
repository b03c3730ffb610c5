"""The life of a run: agree, then rounds of learn, score, remember; then results. Every round ends in a checkpoint."""

from __future__ import annotations

import dataclasses
import errno
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedshift._version import __version__
from fedshift.data.attacks import BACKDOOR_CLASS, parse_attack
from fedshift.data.domain import Dataset
from fedshift.errors import FedshiftError, InputError, SiteError
from fedshift.federation import codec
from fedshift.federation.federation import Federation
from fedshift.federation.handshake import Described, agree
from fedshift.federation.releases import Weights
from fedshift.federation.step import fixed_threads
from fedshift.files import write_failed
from fedshift.functional.averaging import mean_so_far
from fedshift.functional.metrics import share_mistaken
from fedshift.machine import NO_BFLOAT16, emulates_bfloat16
from fedshift.methods import find_about, find_method
from fedshift.methods.base import SHARED, Method
from fedshift.methods.calibration import Calibration, ask_sureness, calibrate, tell
from fedshift.methods.evaluation import SCORED_AT_ONCE, certainty, headline, score_models, score_triggered
from fedshift.methods.probe import with_probed_head
from fedshift.methods.statistics import with_own_statistics
from fedshift.runs.card import model_card
from fedshift.runs.config import RunConfig, as_recorded
from fedshift.runs.directory import MetricsLog, RunDirectory, read_metrics
from fedshift.runs.engines import ENGINES, Connection
from fedshift.runs.files.model import ModelHeader, SavedModel, load_model, save_model
from fedshift.runs.health import find_warnings, mean_losses, sure_shares
from fedshift.runs.heartbeat import Heartbeat
from fedshift.runs.planning import Prepared, base_network, open_federation, prepare
from fedshift.runs.privacy import privacy_results, tell_budgets
from fedshift.runs.progress import Progress, Silent
from fedshift.runs.readiness import read_domains, require_training_data
from fedshift.runs.record import Scores, chosen_round, each_ledger, read_results
from fedshift.runs.results import Memory, Replan, make_results, round_to, scored_on, unscored
from fedshift.runs.tracking import Tracking

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def run(
    config: RunConfig,
    out: Path,
    *,
    dataset: Dataset | None = None,
    resume: bool = False,
    debug: bool = False,
    progress: Progress | None = None,
    track: Sequence[str] = (),
) -> dict[str, Any]:
    """Trains as configured into the run directory `out` and returns its results. `dataset` is the data where it is not
    to be opened by name or folder. `track` names trackers that get the metrics too."""
    directory, shown = RunDirectory(out), progress or Silent()
    if resume and directory.config.exists():
        config = as_recorded(config, directory.config)
    # A tracker that is not installed is an error before anything is begun.
    kind = ENGINES.find(config.engine)
    if kind.is_local:
        with shown, Heartbeat(shown, directory.progress) as heart:
            prepared = prepare(config, dataset, reading=heart.reading)
            tracking = Tracking(track, prepared.config, out)
            prepared = read_domains(prepared)
            with directory.locked(), kind.connect(config, "", shown.message) as sites:
                return _run_in(directory, prepared, shown, heart, resume, tracking, sites, debug)
    if debug:
        raise InputError("config-value", f"--debug is for runs on one machine, not for engine {config.engine}")
    if dataset is not None:
        raise InputError("config-value", f"data in memory is for runs on one machine, not for engine {config.engine}")
    tracking = Tracking(track, config, out)
    with shown, directory.locked(), Heartbeat(shown, directory.progress) as heart:
        heart.doing("connecting to the sites")
        with kind.connect(config, directory.identity(), shown.message) as sites:
            prepared = prepare(config, sites.dataset, is_local=False)
            return _run_in(directory, prepared, shown, heart, resume, tracking, sites)


def _run_in(
    directory: RunDirectory,
    prepared: Prepared,
    shown: Progress,
    heart: Heartbeat,
    resume: bool,
    tracking: Tracking,
    sites: Connection,
    debug: bool = False,
) -> dict[str, Any]:
    directory.prepare(prepared.config, resume)
    if directory.done.exists():
        directory.require_whole()
        return read_results(directory.path)
    if resume and not any(directory.checkpoints.glob("*")):
        shown.message(f"{directory.path} has no checkpoint to resume from: starting at round 1")
    # The coordinator's own sums have the plan's threads too, whatever the environment says.
    with directory.failure_marked(), fixed_threads(prepared.plan.threads):
        fed = open_federation(prepared, directory.sites, debug=debug, sites=sites)
        try:
            return _Execution(prepared, directory, fed, shown, heart, tracking).go()
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            raise write_failed(Path(error.filename or directory.path), error) from error
        finally:
            fed.engine.close()


class _Execution:
    def __init__(
        self,
        prepared: Prepared,
        directory: RunDirectory,
        fed: Federation,
        progress: Progress,
        heart: Heartbeat,
        tracking: Tracking,
    ) -> None:
        self.tracking, self.heart = tracking, heart
        fed.watch = heart
        self.config, self.plan, self.roles = prepared.config, prepared.plan, prepared.roles
        self.prepared, self.directory, self.fed, self.progress = prepared, directory, fed, progress
        implementation = find_method(prepared.plan.method)
        self.method: Method = implementation(codec.restore(implementation.hyper_type, dict(prepared.plan.hyper)))
        self.state_type = implementation.state_type
        self.used: Mapping[str, Weights] | None = None
        self.has_backdoor = any(parse_attack(text).kind == "backdoor" for text in self.config.attack)

    def go(self) -> dict[str, Any]:
        for warning in self.prepared.dataset.warnings:
            self.progress.message(f"warning: {warning}")
        if self.config.precision == "bfloat16" and self.config.device == "cpu" and emulates_bfloat16():
            self.progress.message(f"warning: precision=bfloat16: {NO_BFLOAT16}")
        memory = self._recall()
        sites = [person.name for person in self.roles.sites] + ([self.roles.home.name] if self.roles.home else [])
        self.fed.round = memory.round if memory else 0
        described = agree(self.fed, sites, rewind_to=self.fed.round)
        for site, why in sorted(self.fed.left_out.items()):
            self.progress.message(f"{site} is left out of this run: what it said of itself was refused ({why})")
        sizes = {site: found.sizes["train"] for site, found in described.items()}
        labelled = [site for site, found in described.items() if "train" in found.labelled]
        require_training_data(self.prepared, sizes, labelled)
        has_labels = {(site, split) for site, found in described.items() for split in found.labelled}
        self.validated = tuple(site for site in self.roles.validation if (site, "val") in has_labels)
        self.tested = tuple(site for site in self.roles.tested if (site, "test") in has_labels)
        learning = tuple(person.name for person in self.roles.everyone if person.role != "held-out")
        budgets = tell_budgets(described, self.plan, learning) if memory is None else []
        memory = memory or self._start(described)
        self._replan(memory)
        for line in budgets:
            self.progress.message(line)
        self._restore_counts(memory)
        rounds = self.plan.training.rounds
        self.progress.begin(rounds, memory.round, self._title())
        kept = self.directory.metrics_from(memory.round, memory.metrics_size, memory.metrics_sha256)
        with kept as metrics, self._tracked():
            if memory.round == rounds and not (memory.history and memory.history[-1].round == rounds):
                # It became the last round when the number of rounds was lowered.
                self._write(self._score(memory), rounds, metrics)
                self._remember(memory, metrics)
            for round in range(memory.round + 1, rounds + 1):
                memory = self._round(memory, round, metrics)
                self._remember(memory, metrics)
        return self._finish(memory, described)

    def _replan(self, memory: Memory) -> None:
        """Says what becomes of a run whose number of rounds was changed after some were done."""
        before, training, done = memory.planned, self.plan.training, memory.round
        memory.planned = training.rounds
        if not done or before in (0, training.rounds):
            return
        memory.replans.append(Replan(done, before, training.rounds))
        told = f"{training.rounds} rounds in all, {before} were planned; rounds 1 to {done} stay as they are"
        if done < training.rounds:
            old = dataclasses.replace(training, rounds=before)
            otherwise = f", where it would have been {old.lr_at(done + 1):.3g}" if done < before else ""
            told += (
                f". From here on it goes as in a run of {training.rounds} rounds ({training.schedule}: the learning"
                f" rate was {old.lr_at(done):.3g} in round {done} and is {training.lr_at(done + 1):.3g} in round"
                f" {done + 1}{otherwise}). A run of {training.rounds} rounds from the start ends in another model"
            )
        self.progress.message(told)

    def _remember(self, memory: Memory, metrics: MetricsLog) -> None:
        memory.states = self.directory.site_states()
        memory.metrics_size, memory.metrics_sha256 = metrics.size, metrics.sha256
        self.directory.save_checkpoint(memory.round, memory)

    def _write(self, rows: list[dict[str, Any]], round: int, metrics: MetricsLog) -> None:
        rows = [{"round": round} | row for row in rows]
        metrics.append(rows)
        self.tracking.log(rows)

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        """Trackers follow from here on; however it ends, they are closed."""
        self.tracking.begin(read_metrics(self.directory.metrics)[0], self.progress.message)
        is_finished = False
        try:
            yield
            is_finished = True
        finally:
            self.tracking.end(is_finished)

    def _start(self, described: Mapping[str, Described]) -> Memory:
        base, origin = base_network(self.prepared)
        self.progress.message(origin)
        if self.prepared.choices:
            self.progress.message(self.prepared.choices)
        if self.plan.training.probe_epochs:
            with_probed_head(base, self.fed)
            epochs = self.plan.training.probe_epochs
            self.progress.message(f"the head was first trained alone, for {epochs} epochs at each site")
        memory = Memory(0, self.method.init(base, self.fed))
        memory.learning, memory.counters, memory.sent = (
            self.fed.learning,
            dict(self.fed.counters),
            self.fed.broadcasts.state(),
        )
        for site, found in described.items():
            if found.skipped:
                self.progress.message(f"{site}: {found.skipped} files could not be read (see fedshift check-data)")
                memory.counters["skipped.files"] = memory.counters.get("skipped.files", 0) + found.skipped
            if found.dark:
                self.progress.message(f"{site}: {found.dark} 16-bit images are nearly black (see fedshift check-data)")
                memory.counters["dark.files"] = memory.counters.get("dark.files", 0) + found.dark
        for site in self._unlabelled():
            if site in described and "train" in described[site].labelled:
                self.progress.message(f"{site}: its training labels are not used, only its inputs are")
        for site in self.roles.tested:
            if site in described and site not in self.tested:
                self.progress.message(f"{site} {unscored('test', described[site].sizes)}")
            elif site in described:
                self.progress.message(scored_on(site, described[site].sizes))
        for site in self.roles.validation:
            if site in described and site not in self.validated and described[site].sizes["val"]:
                self.progress.message(f"{site} {unscored('val', described[site].sizes)}")
        for attack in self.config.attack:
            self.progress.message(f"attack: {attack}")
        return memory

    def _unlabelled(self) -> list[str]:
        """Sites that learn without labels, whether they have some or not."""
        return [person.name for person in self.roles.everyone if person.role == "unlabelled"]

    def _round(self, memory: Memory, round: int, metrics: MetricsLog) -> Memory:
        started = time.perf_counter()
        self.heart.begin_round(round, self.plan.training.rounds, self._expected_batches())
        self.fed.begin(round)
        before = dict(self.fed.counters)
        state = self.method.round(memory.state, self.fed)
        if self.config.aggregation not in ("mean", "clipped") and not self.fed.has_averaged:
            raise InputError(
                "config-value", f"aggregation: {self.config.method} combines models in its own way; leave it out"
            )
        rows = [{"phase": "train", "site": n.site, "name": n.name, "value": n.value} for n in self.fed.notes]
        memory = dataclasses.replace(memory, round=round, state=state)
        self._add_to_mean(memory)
        if round % self.config.evaluate_every == 0 or round == self.plan.training.rounds:
            rows += self._score(memory)
        memory.seconds += time.perf_counter() - started
        memory.counters = dict(self.fed.counters)
        memory.learning, memory.scoring = self.fed.learning, self.fed.scoring
        memory.sent = self.fed.broadcasts.state()
        rows += [
            {"phase": "round", "site": "", "name": "bytes_up", "value": self.fed.learning.up},
            {"phase": "round", "site": "", "name": "bytes_down", "value": self.fed.learning.down},
            {"phase": "round", "site": "", "name": "seconds", "value": round_to(memory.seconds)},
        ]
        self._write(rows, round, metrics)
        for name, count in self.fed.counters.items():
            if count > before.get(name, 0):
                self.progress.message(f"round {round}: {name} x{count - before.get(name, 0)}")
        self.heart.end_round()
        scores = memory.history[-1] if memory.history and memory.history[-1].round == round else Scores(round, {}, {})
        self.progress.round(round, scores.val, scores.test)
        return memory

    def _expected_batches(self) -> int:
        """A guess: everyone passes through their data as configured, and is then scored."""
        training, sizes = self.plan.training, self.fed.sizes
        learning = sum(
            math.ceil(sizes[person.name]["train"] * training.local_epochs / training.batch_size)
            for person in self.roles.everyone
            if person.name in sizes and person.role != "held-out"
        )
        parts = [(site, "val") for site in self.validated] + [(site, "test") for site in self.tested]
        return learning + sum(math.ceil(sizes[site][split] / SCORED_AT_ONCE) for site, split in parts if site in sizes)

    def _score(self, memory: Memory) -> list[dict[str, Any]]:
        """Scores the round's models, keeps those of the best validated round, and gives rows for the metrics."""
        models, task = self._models(memory), self.plan.model.task
        val = memory.validation = score_models(self.fed, models, self.validated, "val")
        models = self.used = self._as_used(models)
        memory.confusions = score_models(self.fed, models, self.tested, "test")
        if self.has_backdoor:
            triggered = score_models(self.fed, models, self.tested, "test", score_triggered)
            memory.backdoor = {site: share_mistaken(matrix, BACKDOOR_CLASS) for site, matrix in triggered.items()}
        scores = Scores(
            memory.round,
            {site: headline(matrix, task) for site, matrix in val.items()},
            {site: headline(matrix, task) for site, matrix in memory.confusions.items()},
        )
        memory.history = [*memory.history, scores]
        if chosen_round(memory.history) is scores:
            save_model(self.directory.chosen_model, self._saved(models))
        if memory.round < self.plan.training.rounds:
            save_model(self.directory.model, self._saved(models))  # For `predict`, while the run is not finished.
        name = "accuracy" if task == "classification" else "miou"
        return [
            {"phase": phase, "site": site, "name": what, "value": round_to(value)}
            for phase, what, values in (
                ("val", name, scores.val),
                ("test", name, scores.test),
                ("attack", "backdoor", memory.backdoor),
            )
            for site, value in values.items()
        ] + self._certainty(models)

    def _certainty(self, models: Mapping[str, Weights]) -> list[dict[str, Any]]:
        """How sure the shared model is of the target's unlabelled data, where the coordinator has them: rounds may be
        chosen by it."""
        if self.plan.setting != "adapt" or self.roles.home is None or SHARED not in models:
            return []
        found = self.fed.at_home(certainty, model=models[SHARED])
        values = {"target_entropy": found.entropy, "target_information": found.information}
        return [
            {"phase": "target", "site": self.roles.home.name, "name": name, "value": round_to(value)}
            for name, value in values.items()
        ]

    def _finish(self, memory: Memory, described: Mapping[str, Described]) -> dict[str, Any]:
        models = self.used
        if models is None:
            # All rounds had been done when this was resumed. What is measured again is not counted again.
            learning = dataclasses.replace(memory.learning)
            models = self._as_used(self._models(memory))
            self.fed.learning = memory.learning = learning
        promised = privacy_results(described, self.directory.sites)
        # A budget of privacy is for learning; besides, its noise is not made for these counts.
        before = Counter(self.fed.counters)
        made, told = (Calibration(), {}) if promised else self._calibrated(memory, models)
        memory.counters = dict(Counter(memory.counters) + (self.fed.counters - before))
        digest = save_model(self.directory.model, self._saved(models, made))
        results = make_results(self.prepared, memory, digest, self.tested, described, self.progress.message)
        if promised:
            results["privacy"] = promised
        results["calibration"] = told
        rows = read_metrics(self.directory.metrics)[0]
        results["warnings"] = find_warnings(results, memory.history, mean_losses(rows), sure_shares(rows))
        self.directory.write_results(results)
        ledgers = ((site, lines) for site, lines, _ in each_ledger(self.directory))
        self.directory.write_card(model_card(self.config, self.plan, results, ledgers))
        self.directory.mark_done()
        self.progress.finish(results)
        return results

    def _add_to_mean(self, memory: Memory) -> None:
        """The last `average_rounds` of the rounds count: a share, rounded to whole rounds."""
        rounds = self.plan.training.rounds
        if memory.round <= rounds - round(rounds * (self.config.average_rounds or 0.0)):
            memory.mean, memory.mean_of = {}, {}  # There is one if the run had fewer rounds when it was started.
        else:
            for name, model in self.method.models(memory.state).items():
                memory.mean_of[name] = memory.mean_of.get(name, 0) + 1
                memory.mean[name] = mean_so_far(memory.mean.get(name, {}), model, memory.mean_of[name])

    def _models(self, memory: Memory) -> Mapping[str, Weights]:
        """What is scored and kept: the method's models, or their means over rounds where there are some by now."""
        return {**self.method.models(memory.state), **memory.mean}

    def _calibrated(self, memory: Memory, used: Mapping[str, Weights]) -> tuple[Calibration, dict[str, Any]]:
        """How sure the finished model may be, from the sources' validation, and what came of it at the targets."""
        if self.plan.model.task != "classification":
            return Calibration(), {}
        try:
            validation = ask_sureness(self.fed, self._models(memory), self.validated, "val")
            tests = ask_sureness(self.fed, used, self.tested, "test")
        except SiteError as error:  # The model is there, and this is not worth losing it.
            self.progress.message(f"probabilities are not calibrated: {error.message}")
            return Calibration(), {}
        made = calibrate(validation)
        return made, tell(made, validation, tests, self.plan.model.classes)

    def _as_used(self, models: Mapping[str, Weights]) -> Mapping[str, Weights]:
        """The models with the statistics that they are used with. DualAdapt's clients train with their own and have
        sent them."""
        has_own = self.plan.setting == "multi-adapt" and find_about(self.plan.method).uses_statistics
        return models if self.config.norm != "own" or has_own else with_own_statistics(self.fed, models)

    def _saved(self, models: Mapping[str, Weights], made: Calibration | None = None) -> SavedModel:
        header = ModelHeader.of(self.plan, self.prepared.dataset.mask_ids)
        if made is not None:
            header = dataclasses.replace(header, temperature=made.temperature, far=made.far, usual=made.usual)
        return SavedModel(header, models)

    def _recall(self) -> Memory | None:
        tree, problems = self.directory.load_checkpoint()
        for problem in problems:
            self.progress.message(f"{problem}: going on from the checkpoint before it")
        if tree is None:
            return None
        if self.directory.chosen_model.exists():
            # A later round may not replace it, and then the finished run would have a damaged model.
            try:
                load_model(self.directory.chosen_model)
            except FedshiftError as error:
                raise InputError(
                    "run-corrupt", f"{error.message}. Restore it from a copy, or delete it to go on without it."
                ) from error
        elif tree.get("history"):
            self.progress.message(f"{self.directory.chosen_model.name} is gone: going on without it")
        try:
            state = codec.restore(self.state_type, codec.completed(self.state_type, tree.pop("state")), "state")
            memory = codec.restore(Memory, codec.completed(Memory, tree | {"state": None}))
        except FedshiftError as error:
            raise InputError(
                "run-corrupt",
                f"the checkpoints of {self.directory.path} were written by fedshift {self.directory.written_by()} and"
                f" cannot be continued by {__version__}: {error.message}",
            ) from error
        memory.state = state
        return memory

    def _restore_counts(self, memory: Memory) -> None:
        self.fed.counters = Counter(memory.counters)
        self.fed.learning, self.fed.scoring = memory.learning, memory.scoring
        self.fed.broadcasts.restore(memory.sent)

    def _title(self) -> str:
        where = f"home {self.config.home}" if self.config.home else f"target {self.config.target or 'none'}"
        return f"{self.config.method} ({self.plan.setting}) on {self.prepared.dataset.name}, {where}"
