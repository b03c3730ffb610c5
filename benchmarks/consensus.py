"""Time of knowledge vote and consensus focus, relative to a plain loop over samples and teachers, with one thread.

python benchmarks/consensus.py prints one JSON line. For each sample, the loop votes again without each teacher, so its
cost grows with the square of the number of teachers. It gets fewer samples; both are compared by the time per sample.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fedshift.functional.consensus import Rule, consensus_focus, knowledge_vote

TEACHERS = (3, 5, 10, 50, 100)
CLASSES = (10, 345)
RULE = Rule(gate=0.9)
REPEATS = 5
NUMBERS = 2_000_000
"""Probabilities per measurement, which sets the number of samples."""
LOOP_SECONDS = 0.6
"""Seconds that the loop may take for one case, approximately."""


def looped_vote(opinions: Tensor) -> tuple[Tensor, float]:
    """p and n_p of one sample, `(K, C)` to `(C,)`."""
    confident = opinions[opinions.amax(1) > RULE.gate]
    if len(confident):
        elected = confident.sum(0).argmax()
        supporters = confident[confident.argmax(1) == elected]
        if len(supporters):
            return supporters.mean(0), float(len(supporters))
    return opinions.mean(0), RULE.doubt


def looped_focus(opinions: Tensor) -> list[float]:
    """Each teacher's contribution to n_p max p of one sample."""

    def quality(members: Tensor) -> float:
        p, weight = looped_vote(members)
        return weight * float(p.max())

    whole, everyone = quality(opinions), torch.arange(len(opinions))
    return [whole - quality(opinions[everyone != k]) for k in range(len(opinions))]


def made_up(teachers: int, samples: int, classes: int) -> Tensor:
    """Probabilities of teachers that are mostly confident and mostly right, `(K, N, C)`."""
    generator = torch.Generator().manual_seed(teachers * classes)
    truth = torch.nn.functional.one_hot(torch.randint(classes, (samples,), generator=generator), classes)
    noise = torch.randn(teachers, samples, classes, generator=generator)
    return ((6 + torch.log(torch.tensor(float(classes)))) * truth + 2 * noise).softmax(2)


def seconds(work: Callable[[], object]) -> float:
    """Processor time of this thread: other programs do not count."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def loop_seconds(q: Tensor) -> tuple[float, float]:
    """Seconds per sample of a vote and of a focus, for as many samples as fit into `LOOP_SECONDS`."""
    votes, focuses, used = [], [], 0.0
    for x in range(q.shape[1]):
        votes.append(seconds(lambda x=x: looped_vote(q[:, x])))
        focuses.append(seconds(lambda x=x: looped_focus(q[:, x])))
        used += votes[-1] + focuses[-1]
        if used > LOOP_SECONDS:
            break
    return statistics.median(votes), statistics.median(focuses)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for classes in CLASSES:
        for teachers in TEACHERS:
            samples = NUMBERS // (teachers * classes)
            q = made_up(teachers, samples, classes)
            votes = [seconds(lambda q=q: knowledge_vote(q, RULE)) / samples for _ in range(REPEATS)]
            focuses = [seconds(lambda q=q: consensus_focus(q, RULE)) / samples for _ in range(REPEATS)]
            vote, focus = statistics.median(votes), statistics.median(focuses)
            loop_vote, loop_focus = loop_seconds(q)
            rows.append(
                {
                    "classes": classes,
                    "teachers": teachers,
                    "vote us": round(vote * 1e6, 2),
                    "times the loop": round(loop_vote / vote, 1),
                    "focus us": round(focus * 1e6, 2),
                    "times its loop": round(loop_focus / focus, 1),
                    "focus us per teacher": round(focus * 1e6 / teachers, 3),
                }
            )
    print(json.dumps({"benchmark": "consensus", "per sample": rows}))


if __name__ == "__main__":
    main()
