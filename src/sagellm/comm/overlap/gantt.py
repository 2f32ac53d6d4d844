"""A schedule as text: a line for each lane, time from left to right."""

from __future__ import annotations

from sagellm.core.protocols.overlap import OverlapSchedule

MARKS, PARTLY = "#=", "."
_BUSY, _ROUNDING = 0.5, 1e-9


def gantt_text(schedule: OverlapSchedule, width: int = 72) -> str:
    """Draw a schedule in `width` columns of time.

    Consecutive tasks of a lane have different marks; a column has that of the last task in it, or a dot where
    the lane is idle for more than half of it. The last line says how much is hidden.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    whole_s = schedule.makespan_s
    if not whole_s:
        return "nothing takes time"
    idle = schedule.idle_shares
    busy = {lane: [0.0] * width for lane in idle}
    marks = {lane: [" "] * width for lane in idle}
    counts = dict.fromkeys(idle, 0)
    for slot in schedule.slots:
        lane, start, stop = slot.task.lane, slot.start_s / whole_s * width, slot.end_s / whole_s * width
        for column in range(int(start), min(width, int(stop) + 1)):
            share = min(stop, column + 1) - max(start, column)
            if share > _ROUNDING:
                busy[lane][column] += share
                marks[lane][column] = MARKS[counts[lane] % len(MARKS)]
        counts[lane] += slot.task.duration_s > 0
    label = max(map(len, idle))
    lines = []
    for lane, shares in busy.items():
        row = "".join(
            mark if share >= _BUSY else PARTLY if share > 0 else " "
            for mark, share in zip(marks[lane], shares, strict=True)
        )
        lines.append(f"{lane:<{label}} |{row}| idle {idle[lane]:.1%}")
    end = f"{whole_s * 1e3:,.4g} ms"
    lines.append(f"{'':<{label}}  0{end:>{max(width - 1, len(end) + 1)}}")
    return "\n".join([*lines, f"{schedule.hidden_fraction:.1%} hidden"])
