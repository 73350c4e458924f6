"""Programs that were wrong once, and those that still are; each is the smallest of its class."""

from __future__ import annotations

from tests.vescale_fsdp.runtime.fuzz.habits.program import Event, Program

CURED: dict[str, Program] = {
    "a write while gathered": Program(events=(Event("gathered", "write.mul"),)),
    "a write while gathered, behind the backward": Program(events=(Event("gathered_graded", "write.row"),)),
    "a write to .data while gathered": Program(events=(Event("gathered", "data.clamp", handle="full"),)),
    ".data replaced while gathered": Program(events=(Event("gathered", "data.set"),)),
    "a write to the sharded parameter while it is gathered too": Program(
        events=(Event("gathered", "write.mul", handle="kept"),), closes=False
    ),
    "a write in the forward, before the weight is used": Program(events=(Event("forward", "write.norm"),)),
    "a write to .data in the forward": Program(events=(Event("forward", "data.mul"),)),
    "a write to .data in the forward, after the weight was used": Program(
        events=(Event("forward", "data.mul", place="blocks.0 ends"),)
    ),
    ".data of the sharded parameter replaced in the forward": Program(
        events=(Event("forward", "data.set", handle="kept"),)
    ),
    "a write to .data in the backward": Program(
        events=(Event("backward", "data.mul", place="blocks.0 ends"),)
    ),
    "a code that each forward moves": Program(
        events=(
            Event("forward", "data.mul", target="blocks.0.code"),
            Event("gathered", "write.init", target="blocks.0.code"),
        )
    ),
    "an embedding with max_norm": Program(max_norm=True),
    "an embedding with max_norm, with the head": Program(unit="emb_head", max_norm=True),
    "a write while gathered, to a parameter that gathers itself": Program(
        unit="self_gathering", events=(Event("gathered", "write.mul"),)
    ),
    "an optimizer built while gathered": Program(events=(Event("gathered", "optimizer.new", target="all"),)),
    "an optimizer built between forward and backward": Program(
        events=(Event("middle", "optimizer.new", target="all"),)
    ),
    "an optimizer of parameters that were listed while gathered": Program(
        events=(Event("sharded", "optimizer.new", target="all", handle="full"),)
    ),
    "a parameter added to the optimizer while gathered": Program(
        events=(Event("gathered", "optimizer.group"),)
    ),
    "a write between forward and backward": Program(events=(Event("middle", "write.mul"),)),
    "a write in the backward before the weight is used": Program(
        events=(Event("backward", "write.mul", place="blocks.0 ends"),)
    ),
    "a load between forward and backward": Program(events=(Event("middle", "load", target="all"),)),
    "a step of the optimizer between forward and backward": Program(
        events=(Event("middle", "optimizer.step", step=1),), zeros="nothing"
    ),
    "a step of the optimizer between two backwards": Program(
        events=(Event("micros", "optimizer.step"),), micros=2, backward="ahead"
    ),
    "a gradient hook that reads a weight of the root": Program(reader="hook"),
    "a gradient hook that reads a tied weight": Program(reader="hook", reads="emb", tied=True),
    "a function that looks up a weight of the root in its backward": Program(reader="function"),
    "a loss by the head's weight, with norm and head a unit": Program(unit="norm_head", loss="fused"),
    "a loss in chunks, with norm and head a unit": Program(unit="norm_head", loss="chunked"),
    "a loss by the head's weight, with embedding and head a unit": Program(unit="emb_head", loss="fused"),
    "a loss by a tied weight, with embedding and head a unit": Program(
        unit="emb_head", loss="chunked", tied=True
    ),
    "a loss on a tensor that was kept, of a model that is one unit": Program(unit="root", loss="aside"),
    "a returned view that is changed in place, of a model that is one unit": Program(
        unit="root", loss="view"
    ),
    "a returned view that is changed in place, two backwards": Program(loss="view", backward="twice"),
    "a returned view that is changed in place, two forwards first": Program(
        loss="view", backward="ahead", micros=2
    ),
    "a returned view of a list that is changed in place, two backwards": Program(
        unit="emb_head", loss="view", backward="twice"
    ),
    "a gradient penalty": Program(penalty=True),
    "a gradient penalty of a loss in the root": Program(loss="fused", penalty=True),
    "a gradient penalty while weights stay": Program(penalty=True, reshard=False, micros=2, stays=True),
    "a gradient mask set before sharding": Program(events=(Event("before", "hook.mask"),)),
    "a gradient mask": Program(events=(Event("sharded", "hook.mask"),)),
    "a hook that a sharded parameter has while it is gathered": Program(
        events=(Event("gathered", "hook.record", handle="kept"),)
    ),
    "a hook behind the gradient set before sharding": Program(events=(Event("before", "hook.after"),)),
    "a hook behind the gradient set while gathered": Program(events=(Event("gathered", "hook.after"),)),
    "a hook that scales gradients set while gathered": Program(
        events=(Event("gathered", "hook.after_scale"),)
    ),
    "a hook that steps set in the forward": Program(events=(Event("forward", "hook.after_step"),)),
    "an attribute set before sharding": Program(events=(Event("before", "attribute"),)),
    "an attribute set while gathered": Program(events=(Event("gathered", "attribute"),)),
    "an attribute set in the forward": Program(events=(Event("forward", "attribute"),)),
    "zero_grad of the model after no_sync": Program(
        events=(Event("micros", "zero.model", target="all"),), micros=2, sync="no_sync"
    ),
    "zero_grad of the optimizer after no_sync": Program(
        events=(Event("micros", "zero.optimizer", target="all"),), micros=2, sync="no_sync"
    ),
    "zero_grad in place after no_sync": Program(
        events=(Event("micros", "zero.optimizer_keep", target="all"),), micros=2, sync="no_sync"
    ),
    "gradients set to None after no_sync": Program(
        events=(Event("micros", "zero.none", target="all", handle="full"),), micros=2, sync="no_sync"
    ),
    "zero_grad on one rank after no_sync": Program(
        events=(Event("micros", "zero.model", target="all", alone=True),), micros=2, sync="no_sync"
    ),
    "zero_grad before gradients were summed over replicas": Program(
        unit="hsdp", events=(Event("micros", "zero.model", target="all"),), micros=2, sync="no_all_reduce"
    ),
    "gradients read while gathered": Program(events=(Event("gathered_graded", "read.grad"),)),
    "gradients set to None while gathered": Program(
        events=(Event("gathered_graded", "zero.none", target="all"),)
    ),
    "a norm clipped while gathered": Program(events=(Event("gathered_graded", "clip.norm", target="all"),)),
    "frozen while gathered": Program(events=(Event("gathered", "freeze.off"),)),
    "a module frozen while gathered": Program(events=(Event("gathered", "freeze.module"),)),
    "trained while gathered": Program(events=(Event("gathered", "freeze.on", target="blocks.0.code"),)),
    "trained in the forward": Program(events=(Event("forward", "freeze.on", target="blocks.0.code"),)),
    "a write in the root's forward to a weight of the block behind it": Program(
        events=(Event("forward", "write.mul", step=1, place="root begins"),)
    ),
    "a write in the forward, to a weight of the block before": Program(
        events=(Event("forward", "write.norm", place="blocks.1 begins"),)
    ),
    "a write to .data of the sharded parameter while it is gathered": Program(
        events=(Event("gathered", "data.mul", handle="kept"),)
    ),
    "a write to .data of the sharded parameter in the forward": Program(
        events=(Event("forward", "data.row", handle="kept"),)
    ),
    "a write to the sharded parameter in the forward": Program(
        events=(Event("forward", "write.mul", handle="kept"),)
    ),
    "frozen by the parameter that was gathered": Program(
        events=(Event("middle", "freeze.off", handle="full"),)
    ),
    "trained by the parameter that was gathered": Program(
        events=(Event("sharded", "freeze.on", target="blocks.0.code", handle="full"),)
    ),
    "a norm clipped by hand while gathered": Program(
        events=(Event("gathered_graded", "clip.hand", target="all"),)
    ),
    "frozen between forward and backward": Program(
        events=(Event("middle", "freeze.off", target="emb.weight"),)
    ),
    "a module frozen between micro-batches, after no_sync": Program(
        events=(Event("micros", "freeze.module"),), micros=2, sync="no_sync"
    ),
    "a norm clipped while weights stay": Program(
        events=(Event("micros", "clip.norm", target="all"),), micros=2, stays=True
    ),
    ".data replaced while gathered, with tensor parallelism": Program(
        unit="tp", events=(Event("gathered_graded", "data.set"),)
    ),
    ".data replaced in the backward, with tensor parallelism": Program(
        unit="tp", events=(Event("backward", "data.set"),)
    ),
    "a module frozen in the backward": Program(
        events=(Event("backward", "freeze.module", place="blocks.0 ends"),)
    ),
    "a loss of a weight alone between micro-batches, after no_sync": Program(
        events=(Event("micros", "loss.direct"),), micros=2, sync="no_sync"
    ),
    "gradients set to None while gathered, with tensor parallelism": Program(
        unit="tp", events=(Event("gathered_graded", "zero.none", target="all"),)
    ),
    ".data replaced in the forward": Program(events=(Event("forward", "data.set"),)),
    ".data replaced between forward and backward": Program(events=(Event("middle", "data.set"),)),
    "a write on one rank while gathered": Program(events=(Event("gathered", "write.mul", alone=True),)),
    "values clipped of parameters that were listed while gathered": Program(
        events=(Event("graded", "clip.value", target="all", handle="full"),)
    ),
    "a write on one rank while gathered, behind the backward": Program(
        events=(Event("gathered_graded", "write.norm", alone=True),)
    ),
    "a gradient penalty, two backwards": Program(penalty=True, backward="twice"),
    "a loss on a tensor that was kept, two backwards of a model that is one unit": Program(
        unit="root", loss="aside", backward="twice"
    ),
    "a loss on a tensor that was kept, of a model that is one unit and reshards": Program(
        unit="root", loss="aside", reshard=True
    ),
    "a loss on a tensor that was kept, and a recomputed read of the root": Program(
        reshard=True, reader="recompute", reads_at=1, loss="aside"
    ),
    "a loss on a tensor that was kept, two backwards, and a hook that reads the root": Program(
        reader="hook", loss="aside", backward="twice"
    ),
    ".data replaced after an exception, two backwards": Program(
        unit="root", events=(Event("broken", "data.set"),), backward="twice", breaks="forward"
    ),
    "a hook behind the gradient set in the backward, behind the parameter's gradient": Program(
        events=(Event("backward", "hook.after_step", handle="kept"),)
    ),
    "a hook behind the gradient of a root's weight set in the backward": Program(
        events=(Event("backward", "hook.after", target="emb.weight"),)
    ),
    "a step while weights stay that a forward has renormalized": Program(
        events=(Event("micros", "optimizer.step"),), max_norm=True, micros=2, stays=True
    ),
    "frozen by the sharded parameter in the forward": Program(
        events=(Event("forward", "freeze.off", target="norm.weight", handle="kept"),)
    ),
    "trained by the sharded parameter while it stays gathered": Program(
        events=(Event("gathered", "freeze.on", target="blocks.0.code", handle="kept"),),
        reshard=False,
        closes=False,
    ),
    "a weight added to the optimizer between forward and backward": Program(
        events=(Event("middle", "optimizer.group", target="norm.weight"),), loss="aside"
    ),
    "a hook that reads a list's weight in a second backward": Program(
        unit="emb_head", reader="hook", backward="twice"
    ),
    "a recomputed read of a list's weight in the second of two backwards": Program(
        unit="emb_head", reader="reentrant", backward="ahead", micros=2
    ),
    "a write to the sharded parameter in the backward, behind its use": Program(
        events=(Event("backward", "write.norm", handle="kept"),)
    ),
    "a write to the sharded parameter in the forward, before its use": Program(
        events=(Event("forward", "write.row", handle="kept"),)
    ),
    "a write to .data of the sharded parameter in the forward, behind its use": Program(
        events=(Event("forward", "data.clamp", handle="kept", place="blocks.0 ends"),)
    ),
    ".data replaced between forward and backward, with tensor parallelism": Program(
        unit="tp", events=(Event("middle", "data.set"),)
    ),
    "a hook that reads a list's weight that no loss has reached": Program(
        unit="norm_head", reshard=False, reader="hook", loss="aside"
    ),
    "a recomputed read of a list's weight, with a backward in the forward": Program(
        unit="emb_head", reader="reentrant", loss="early"
    ),
    "a copy of a gathered parameter, with tensor parallelism": Program(
        unit="tp", events=(Event("forward", "copy.param"),)
    ),
    "a write to a sharded parameter while weights stay that a forward has renormalized": Program(
        unit="root",
        events=(Event("micros", "write.norm", handle="kept"),),
        max_norm=True,
        micros=2,
        stays=True,
    ),
}

WRONG: dict[str, Program] = {
    "a write to .data on one rank while gathered": Program(
        events=(Event("gathered", "data.mul", alone=True),)
    ),
    "a write on one rank while gathered that changes nothing": Program(
        events=(Event("gathered_graded", "write.mask", target="norm.weight", alone=True),)
    ),
}

# One rank alone starts a collective: all ranks raise, and no values are mixed up. FSDP2 hangs.
ALONE: dict[str, Program] = {
    f"{habit} {moment}": Program(
        events=(Event(moment, habit, target, step=1, alone=True),), micros=micros, zeros="keep"
    )
    for habit, target in (
        ("read.sum", "blocks.0.up.weight"),
        ("read.full", "blocks.0.up.weight"),
        ("read.grad", "blocks.0.up.weight"),
        ("clip.norm", "all"),
        ("copy.state", "all"),
    )
    for moment, micros in (("sharded", 1), ("micros", 2), ("graded", 1))
    if (habit, moment) not in (("read.grad", "micros"), ("clip.norm", "sharded"))
} | {
    "a write to a sharded parameter in the forward": Program(
        events=(Event("forward", "write.mul", handle="kept", alone=True),)
    ),
    ".data of a root's weight replaced between forward and backward": Program(
        events=(Event("middle", "data.set", target="emb.weight", handle="kept", alone=True),)
    ),
}

# Seeds of `make test` whose programs are wrong today.
WRONG_SEEDS: frozenset[int] = frozenset()
