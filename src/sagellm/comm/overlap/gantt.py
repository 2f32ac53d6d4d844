"""A schedule as text: a line for each lane, time from left to right."""

from __future__ import annotations

from sagellm.core.protocols.overlap import OverlapSchedule

MARKS = "#="


def gantt_text(schedule: OverlapSchedule, width: int = 72) -> str:
    """Draw a schedule in `width` columns of time.

    Consecutive tasks of a lane have different marks. A column shows the last task that runs in it; tasks of
    no length are not drawn. Below the lanes: makespan and hidden fraction.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    whole_s = schedule.makespan_s
    if not whole_s:
        return "nothing takes time"
    idle = schedule.idle_shares
    rows = {lane: [" "] * width for lane in idle}
    counts = dict.fromkeys(idle, 0)
    for slot in schedule.slots:
        lane = slot.task.lane
        first = min(int(slot.start_s / whole_s * width), width - 1)
        stop = max(round(slot.end_s / whole_s * width), first + 1)
        if slot.task.duration_s:
            rows[lane][first:stop] = MARKS[counts[lane] % len(MARKS)] * (stop - first)
            counts[lane] += 1
    label = max(map(len, rows))
    lines = [f"{lane:<{label}} |{''.join(row)}| idle {idle[lane]:.1%}" for lane, row in rows.items()]
    end = f"{whole_s * 1e3:.3g} ms"
    lines.append(f"{'':<{label}}  0{end:>{max(width - 1, len(end) + 1)}}")
    saved = f"{schedule.serial_s * 1e3:.3g} ms one after the other"
    return "\n".join([*lines, f"{schedule.hidden_fraction:.1%} hidden; {saved}"])
