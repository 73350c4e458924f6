"""What a conversion did, for people; ``--json`` has all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_fsdp.conversion.checks.byte_sizes import format_bytes
from vescale_fsdp.errors import some

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.moves.carried_state import ModelNames
    from vescale_fsdp.conversion.convert import ConvertReport

_BY = {"table": "shipped table", "class": "class itself"}
_MOST = 20  # names: a model may lose a thousand, and ``--json`` has them all


def summary(report: ConvertReport) -> str:
    """A few lines."""
    verb = "would write" if report.dry_run else "wrote"
    model = report.state.model
    lines = [
        f"source: {report.source.kind} at {report.source.url}, model prefix {_prefixes(model)}",
        f"{verb} {len(report.state.views)} tensors, {format_bytes(report.plan.tensor_nbytes)}, to {report.target}",
        f"files: {len(report.plan.files)} with tensors, {len(report.plan.closing)} others",
    ]
    if report.part.count > 1:
        mine = report.plan.files[report.part.index :: report.part.count]
        names = some((file.name for file in mine), _MOST)
        lines.append(f"of these, part {report.part.index} of {report.part.count}, counted from 0: {names}")
    if report.outcome.published and not report.outcome.written:
        lines.append("nothing left to do: the result is there")
    elif report.outcome.kept:
        lines.append(f"kept from the interrupted run: {len(report.outcome.kept)} files")
    if not report.outcome.published and not report.dry_run:
        lines.append("not published yet: other parts are still to be written")
    if report.check is not None and report.check.how != "not checked":
        lines.append(f"checked: {report.check.class_name} takes it (by the {_BY[report.check.how]})")
    if report.dropped_optimizer:
        lines.append(f"left out: {report.dropped_optimizer} optimizer entries")
    if report.dropped_others:
        lines.append(f"left out: {some(_by_container(report), _MOST)}")
    lines += [f"left out: {twin} (tied to {kept})" for twin, kept in report.tied.items()]
    if report.uncast:
        lines.append(f"not cast, since quantised or a scale: {some(report.uncast, _MOST)}")
    if report.left_assets:
        lines.append(
            f"files not taken along (--include-asset PATTERN does): {some(report.left_assets, _MOST)}"
        )
    lines += [f"cast: {name} from {old} to {new}" for name, (old, new) in report.casts.items()]
    return "\n".join(lines)


def _by_container(report: ConvertReport) -> list[str]:
    """What was left out, whole containers as such: a trainer's counters and random states are a hundred entries."""
    homes: dict[str, list[str]] = {}
    for name in report.dropped_others:
        root, *inner = map(str, report.source.path(name))
        is_models = not inner or report.state.model.prefix.startswith(f"{root}.")
        homes.setdefault(name if is_models else root, []).append(name)
    return [
        names[0] if len(names) == 1 else f"{home} ({len(names)} entries)" for home, names in homes.items()
    ]


def _prefixes(model: ModelNames) -> str:
    return ", ".join(f"{candidate}." for candidate in model.candidates) or model.prefix or "(root)"
