"""The section of a model card that describes a schedule."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .schedule import RecomputeSchedule


def update_card(card: str, schedule: RecomputeSchedule, repo_id: str, file_name: str) -> str:
    """A model card with the section of one schedule file put in, or replaced where it has one.

    Args:
        card (`str`): the card as it is, `""` for none.
        schedule (`RecomputeSchedule`): the schedule.
        repo_id (`str`): the repository that the card and the file are in.
        file_name (`str`): the file, which the section belongs to.
    """
    begin, end = (f"<!-- {file_name}: {edge} -->" for edge in ("begin", "end"))
    section = f"{begin}\n{_section(schedule, repo_id, file_name)}\n{end}"
    # up to the nearest end and over no second begin: an edge that somebody has deleted must not take text along
    old = re.compile(f"{re.escape(begin)}(?:(?!{re.escape(begin)}).)*?{re.escape(end)}", re.DOTALL)
    if old.search(card):
        return old.sub(lambda _: section, card, count=1)
    return (card.rstrip("\n") + "\n\n" if card.strip() else card) + section + "\n"


def _section(schedule: RecomputeSchedule, repo_id: str, file_name: str) -> str:
    made_for = schedule.model_id or "this model"
    origin = "measured on the model" if schedule.calibrated else "**not measured on the model**"
    wanted = f", for a budget of {schedule.budget:g}" if schedule.budget is not None else ""
    lines = [
        f"## Recompute schedule for vlcache-hf (`{file_name}`)",
        "",
        f"How many of the first tokens of a reused image each of the {schedule.num_layers} decoder layers of "
        f"`{made_for}` recomputes when the image stands in another context "
        "([VLCache](https://arxiv.org/abs/2512.12977)). "
        f"Mean ratio {schedule.mean:.4g}{wanted}; {origin}.",
        "",
        "```python",
        "import vlcache_hf",
        "from transformers import AutoModelForImageTextToText",
        "",
        "model = AutoModelForImageTextToText.from_pretrained(",
        f'    "{schedule.model_id or "..."}",',
        '    attn_implementation="vlcache",',
        f'    vlcache_config={{"schedule": "{repo_id}/{file_name}"}},',
        ")",
        "```",
        "",
        "| layers | ratio |",
        "|---|---|",
    ]
    layer = 0
    for ratio, group in groupby(schedule.ratios):
        last = layer + len(list(group)) - 1
        lines.append(f"| {layer}{f' to {last}' if last > layer else ''} | {ratio:g} |")
        layer = last + 1
    if schedule.guard_threshold is not None:
        lines += ["", f'`guard="escalate"` acts above a deviation of {schedule.guard_threshold:g}.']
    if schedule.method:
        lines += ["", "Made by:", ""]
        # a value may hold anything: on one line, it can end neither the list nor the section
        lines += [f"- {key}: {' '.join(str(value).split())}" for key, value in schedule.method.items()]
    return "\n".join(lines).replace("-->", "→")
