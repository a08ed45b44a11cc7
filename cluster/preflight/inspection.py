"""One pre-flight from a rank's point of view: rank 0 leads, the others follow.

What the worker measures is under a time limit, and so is every wait for another rank: each rank ends, whatever the others do.
Whoever loses rank 0 looks in the job directory for what it has written, and names its node if that is nothing.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster.preflight import records
from cluster.preflight.checks import check_node
from cluster.preflight.figures import ABSENT, NODE_LINK, SILENT, UNCHECKED, Fault, Figures, figures_from
from cluster.preflight.judgement import gone_nodes, judge
from cluster.preflight.links import ALL, BETWEEN, LINK_TIMEOUT_S, WITHIN, Stage, measure_group, stages
from cluster.preflight.meeting import LostError, Meeting
from cluster.preflight.nodes import homes, placed_by_slurm
from cluster.preflight.table import report
from cluster.preflight.worker import NoAnswerError, Task, Tell, Worker
from pretrain.ranks.world import World

SOUND, FAILED, NAMED = 0, 1, 3
"""Exit codes; FAILED: the pre-flight could not be made."""
GRACE_S = 5.0
"""For goodbyes, and for the worker to let go of its GPU."""
MARGIN_S = 15.0
"""What a rank waits beyond the time that another one may take."""
STAGE_S = LINK_TIMEOUT_S + 2 * MARGIN_S
"""For one stage of links from rank 0's word on; then it goes on without those that have not answered. A rank's own measurement
has MARGIN_S less; the others wait longer for rank 0's next word, or they would name its node for waiting for a dead neighbour."""


@dataclass(frozen=True)
class Options:
    job_dir: Path
    fleet: Path | None
    scratch: str
    shared: tuple[str, ...]
    """Directories that all nodes see."""
    read: tuple[str, ...]
    """Files and directories that the ranks will read."""
    is_part: bool
    """The job does not have all GPUs of its nodes."""
    timeout_s: float
    """For the checks of one's own node."""
    come_s: float
    """For coming to the meeting: of all ranks any one may import torch from a cold file system for minutes longer."""

    @property
    def lead_s(self) -> float:
        """How long rank 0 may be silent: it waits for those that come late, whose checks then take their time."""
        return max(self.come_s, self.timeout_s) + self.timeout_s + 3 * MARGIN_S


class Inspection:
    def __init__(self, world: World, options: Options, *, node: str):
        self._world, self._options, self._node = world, options, node
        self._start, self._began_s = records.Start(options.job_dir), time.monotonic()
        self._worker, self._has_met = Worker(self._do), False

    def run(self) -> int:
        """The exit code."""
        try:
            self._meeting = Meeting(
                self._world,
                address=os.environ["MASTER_ADDR"],
                port=int(os.environ["MASTER_PORT"]),
                timeout_s=self._options.come_s,
                is_over=lambda: self._start.outcome() is not None,
            )
            self._has_met = True
            return self._lead() if self._world.is_first else self._follow()
        except LostError as error:
            return self._left_alone(str(error))
        except BaseException:
            if self._world.is_first:  # the others must not take that for a bad node
                self._start.write(found=(), bad={}, code=FAILED)
            raise
        finally:
            self._worker.stop(grace_s=GRACE_S)

    # ---- what any rank does ------------------------------------------------------------------------------------------

    def _do(self, task: Task, tell: Tell) -> dict[str, Any]:
        """In the worker."""
        if task["do"] == "check":
            options = self._options
            return check_node(
                self._world,
                node=self._node,
                scratch=options.scratch,
                shared=options.shared,
                read=options.read,
                tell=tell,
            ).as_json()
        tell(f"its network ({task['name']})")
        return measure_group(
            name=task["name"],
            rank=self._world.rank,
            group=task["group"],
            on_gpu=task["on_gpu"],
            local_rank=self._world.local_rank,
        )

    def _check(self) -> Figures:
        """Come to the meeting first: then a rank that hangs is known to be there."""
        self._meeting.say("here", self._node)
        try:
            found = self._worker.ask({"do": "check"}, timeout_s=self._options.timeout_s, meanwhile=self._meeting.tick)
            figures = figures_from(found)
        except NoAnswerError as error:
            figures = self._without_figures(self._world.rank, self._node, error.fault)
        return replace(figures, local_rank=self._world.local_rank, clock_s=self._meeting.clock_s())

    def _measure(self, word: Mapping[str, Any]) -> dict[str, Any]:
        group = next((group for group in word["groups"] if self._world.rank in group), None)
        if group is None:
            return {}
        task = {"do": "link", "name": word["name"], "group": group, "on_gpu": word["on_gpu"]}
        try:
            return self._worker.ask(task, timeout_s=LINK_TIMEOUT_S + MARGIN_S, meanwhile=lambda: None)
        except NoAnswerError as error:
            return {"failed": error.fault.text}

    def _without_figures(self, rank: int, node: str, fault: Fault) -> Figures:
        local = self._world.num_local_ranks
        return Figures(rank, node, local_rank=rank % local, num_local_ranks=local, faults=(fault,))

    # ---- a rank that follows -----------------------------------------------------------------------------------------

    def _follow(self) -> int:
        figures = self._check()
        self._meeting.say("found", figures.as_json())
        number, patience_s = 0, self._options.lead_s
        while "exit" not in (word := self._meeting.wait_for(f"word-{number}", timeout_s=patience_s)):
            self._meeting.say(f"did-{number}", self._measure(word))
            number, patience_s = number + 1, STAGE_S + 3 * MARGIN_S
        self._meeting.say("bye", True)
        return int(word["exit"])

    def _left_alone(self, why: str) -> int:
        """Rank 0 may be waiting for others still, if this rank alone has lost it."""
        deadline_s = time.monotonic() + (self._options.lead_s if self._has_met else 0)
        while (code := self._start.outcome()) is None and time.monotonic() < deadline_s:
            time.sleep(0.5)
        if code is not None:
            return code
        first = next(iter(placed_by_slurm(self._world.num_ranks)), None)
        if first is None:
            print(f"preflight: could not be made: {self._node}: {why}", file=sys.stderr)
            return FAILED
        reason = f"rank 0 of the pre-flight gives no answer ({self._node}: {why})"
        return self._start.name_unheard(first, reason=reason, code=NAMED)

    # ---- rank 0 ------------------------------------------------------------------------------------------------------

    def _lead(self) -> int:
        found, homeless = self._gather()
        history = records.read_fleet(self._options.fleet) if self._options.fleet else []
        is_part, words = self._options.is_part, 0
        judged = partial(judge, history=history, named=records.named_before(self._options.job_dir), is_part=is_part)
        if not homeless and all(figures.device for figures in found) and not judged(found).bad:
            for stage in stages({figures.rank: figures.node for figures in found}):
                gone = gone_nodes(found)
                groups = stage.without({figures.rank for figures in found if figures.node in gone})
                if groups:
                    found = self._measure_stage(replace(stage, groups=groups), found, number=words)
                    words += 1
        judgement = judged(found)
        code = NAMED if judgement.bad else SOUND
        self._start.write(found=found, bad=judgement.bad, code=code)
        if self._options.fleet is not None:
            try:
                records.append_to_fleet(self._options.fleet, found, is_part=is_part)
            except OSError as error:
                print(f"preflight: warning: the fleet's history goes without this job: {error}", flush=True)
        took_s = time.monotonic() - self._began_s
        print("\n".join(report(found, history, judgement, homeless=homeless, took_s=took_s)), flush=True)
        self._meeting.say_to_all(f"word-{words}", {"exit": code})
        others = [figures.rank for figures in found if figures.device and figures.rank]
        self._meeting.gather("bye", others, timeout_s=GRACE_S)
        return code

    def _gather(self) -> tuple[list[Figures], list[int]]:
        """The figures of all ranks whose node is known, and the ranks that never came, from nobody knows where."""
        ranks, limit_s = range(self._world.num_ranks), self._options.timeout_s
        said = {0: self._check().as_json()}
        left_s = max(1.0, self._began_s + self._options.come_s - time.monotonic())
        here = self._meeting.gather("here", ranks, timeout_s=left_s)
        said |= self._meeting.gather("found", set(here) - {0}, timeout_s=limit_s + MARGIN_S)
        node_of = homes(len(ranks), seen=here, by_slurm=placed_by_slurm(len(ranks)))
        found = []
        for rank in sorted(node_of):
            if rank in said:
                found.append(figures_from(said[rank]))
                continue
            fault = Fault(ABSENT, f"rank {rank} did not come within {self._options.come_s:g} s")
            if rank in here:
                fault = Fault(SILENT, f"rank {rank} fell silent during its checks")
            found.append(self._without_figures(rank, node_of[rank], fault))
        return found, [rank for rank in ranks if rank not in node_of]

    def _measure_stage(self, stage: Stage, found: list[Figures], *, number: int) -> list[Figures]:
        on_gpu = all(figures.is_gpu for figures in found)
        word, deadline_s = {"name": stage.name, "groups": stage.groups, "on_gpu": on_gpu}, time.monotonic() + STAGE_S
        self._meeting.say_to_all(f"word-{number}", word)
        did = {0: self._measure(word)}
        others = {rank for group in stage.groups for rank in group} - {0}
        did |= self._meeting.gather(f"did-{number}", others, timeout_s=deadline_s - time.monotonic())
        node_of = {figures.rank: figures.node for figures in found}
        return [_with_link(figures, stage, did.get(figures.rank), node_of) for figures in found]


def _with_link(figures: Figures, stage: Stage, did: Mapping[str, Any] | None, node_of: Mapping[int, str]) -> Figures:
    group = stage.group_of(figures.rank)
    if group is None:
        return figures
    if did is None:
        return replace(
            figures, faults=(*figures.faults, Fault(SILENT, f"fell silent during the measurement {stage.kind}"))
        )
    rate = did.get("gb_per_s")
    if stage.kind == BETWEEN:
        other = next(node_of[rank] for rank in group if rank != figures.rank)
        return replace(figures, link_gb_per_s={**figures.link_gb_per_s, other: rate or 0.0})
    if rate is None:
        kind = NODE_LINK if stage.kind == WITHIN else UNCHECKED
        return replace(
            figures, faults=(*figures.faults, Fault(kind, f"no connection {stage.kind}: {did.get('failed')}"))
        )
    return replace(figures, **{"world_gb_per_s" if stage.kind == ALL else "node_gb_per_s": rate})
