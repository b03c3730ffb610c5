"""Membership: did this sample take part? By the loss, and by the loss compared with shadow sites.

N. Carlini, S. Chien, M. Nasr, S. Song, A. Terzis, F. Tramer: Membership Inference Attacks From First Principles.
S&P 2022, its offline form: an attacker has sites of its own answer the same questions with other samples, and so
learns how the loss of each sample falls without it. Few shadows tell no sample's own deviation: all share one.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.audit.leakage.messages import Heard, Message, Update, as_images, update_of
from fedshift.audit.leakage.scores import Finding, members_found
from fedshift.data.domain import Split


def losses(net: nn.Module, samples: Split) -> Tensor:
    """Cross-entropy of each sample `(n,)`."""
    images, labels = as_images(samples), torch.from_numpy(np.asarray(samples.labels))
    with torch.no_grad():
        return F.cross_entropy(net.eval()(images).float(), labels, reduction="none")


def told_members(
    update: Update, message: Message, place: int, heard: Heard, others: Split, shadows: int
) -> list[Finding]:
    """Scores of the site's samples and of others: the loss afterwards, and how much further it fell than at shadow
    sites. `place` is the message's number in its round."""
    groups = (message.members, others)
    before = [losses(update.loaded(update.before), group) for group in groups]
    after = [losses(update.loaded(update.after), group) for group in groups]
    if not all(bool(part.isfinite().all()) for part in after):
        return []
    found = [members_found("membership by loss", "weights", -after[0], -after[1])]
    fell: list[list[Tensor]] = [[], []]
    count = min(len(message.members), len(others) // 2)
    for number in range(shadows):
        drawn = torch.randperm(len(others), generator=torch.Generator().manual_seed(number))[:count]
        answers = heard.replay(others.take(drawn.numpy()), number)
        shadow = update_of(message, answers[place]) if place < len(answers) else None
        if shadow is None:
            continue
        for side, group in enumerate(groups):
            gain = before[side] - losses(shadow.loaded(shadow.after), group)
            if side == 1:
                gain[drawn] = torch.nan  # Here these samples took part.
            fell[side].append(gain)
    if len(fell[0]) < 2:
        return found
    usual = [torch.stack(rows).nanmean(0) for rows in fell]
    scores = [(before[side] - after[side] - usual[side]).nan_to_num(0.0) for side in range(2)]
    return [*found, members_found(f"membership, {shadows} shadow sites", "weights", *scores)]
