"""Transfers of a live state between running ranks, of one job or of several jobs, in different layouts.

    transfer = Transfer(plan_transfer(*describe_states(state, into)))      once
    transfer.run(state, into)                                              every step; plans nothing

The functions of `links` define how a target tensor is made from source tensors with other names or shapes:

    plan_transfer(source, target, links={"qkv.weight": links.concatenate("q.weight", "k.weight", "v.weight")})
"""

from vescale_fsdp.lazy import lazily_export

lazily_export(__name__)  # public names are in __init__.pyi
