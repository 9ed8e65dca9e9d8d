"""All communication: groups, the verbs, and the ledger that records every byte."""

from core.comm.collectives import (
    P2P,
    Pending,
    all_gather,
    all_reduce_,
    all_to_all,
    barrier,
    broadcast_,
    broadcast_object,
    exchange,
    gather_objects,
    reduce_scatter,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from core.comm.group import Group
from core.comm.ledger import CommEvent, Ledger, wire_bytes

__all__ = [
    "P2P",
    "CommEvent",
    "Group",
    "Ledger",
    "Pending",
    "all_gather",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "broadcast_",
    "broadcast_object",
    "exchange",
    "gather_objects",
    "reduce_scatter",
    "start_all_gather",
    "start_all_reduce_",
    "start_reduce_scatter",
    "wire_bytes",
]
