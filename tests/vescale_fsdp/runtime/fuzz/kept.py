"""Programs that were wrong once, and those that still are; `python -c` and a seed print more."""

from __future__ import annotations

from tests.vescale_fsdp.runtime.fuzz.program import Block, Micro, Program, Step

CURED = {
    "what was reduced over shards alone was not delivered while its unit rested": Program(
        mesh=(2, 2),
        blocks=(Block(runs="odd steps"), Block(spare="odd steps")),
        steps=(Step(), Step((Micro(sync="no_all_reduce"),)), Step(), Step()),
        optimizer="adamw",
    ),
    "weights of an evaluation between backward and optimizer stayed for the next forward": Program(
        blocks=(Block(), Block(frozen="all")),
        steps=(
            Step(evaluates="no_grad", late=True),
            Step(evaluates="inference"),
            Step(evaluates="inference", late=True),
        ),
        reshard=False,
        optimizer="adamw",
    ),
    "a unit whose output needs a gradient on one rank only is gathered there alone in the backward": Program(
        blocks=(Block(frozen="base", spare="some ranks"), Block()), frozen_ends=True, reshard=True
    ),
    "of a list of modules one rank runs fewer, two forwards before their backwards": Program(
        blocks=(Block(unit="pair"), Block(runs="some ranks")),
        steps=(Step((Micro(forwards=2, apart=True),)),),
    ),
    "all that is trained of a unit is used on one rank alone, two forwards before their backwards": Program(
        blocks=(Block(), Block(frozen="base", spare="some ranks")),
        steps=(Step((Micro(forwards=2, apart=True),)),),
    ),
    "a backward reduces a unit twice, and one rank alone uses what is trained of it": Program(
        blocks=(Block(frozen="base", recompute="reentrant", spare="some ranks", times=2),),
        steps=(Step(),),
    ),
    "a backward reduces a unit twice while reductions overlap, and one rank alone uses a layer": Program(
        mesh=(2, 2),
        blocks=(Block(unit="pair", recompute="reentrant", spare="some ranks"), Block()),
        switches=("streams",),
        steps=(Step((Micro(sync="no_all_reduce"), Micro())), Step()),
    ),
    "an unshard after an evaluation and a step gathered the parts that the evaluation had kept": Program(
        mesh=(4,),
        steps=(Step(evaluates="no_grad", late=True), Step()),
        reshard=2,
        switches=("unshards_ahead",),
    ),
}

# Forwards that only some ranks run: other gathers, which cannot be made up for. `OrderWatch` raises on all ranks, later
# than a program is waited for.
WRONG = {
    "a unit whose forward one rank leaves out": Program(
        blocks=(Block(), Block(runs="some ranks"), Block()),
    ),
}
