"""The one default grid of a process, and Megatron's names for what it knows.

Our own code passes groups as arguments. Code written against `megatron.core.parallel_state` calls
`initialize_model_parallel(...)` and asks: the answers come from one `ProcessGrid`, kept in one
plain module variable (backward runs on other threads, where a context variable would be unset).

Read in this order: the default grid, `resolve`, `initialize_model_parallel`, then the questions:
groups, sizes and ranks, pipeline neighbours, experts. May import core.comm, core.grid and
core.process_grid; used by core.tensor_parallel.
"""

from __future__ import annotations

from functools import partial

from core.comm import Group, torch_groups
from core.grid import RankGrid
from core.process_grid import ProcessGrid

_grid: ProcessGrid | None = None
_handles: dict[str, object] = {}  # "one": the ProcessGroup that stands for every axis of size 1
_overrides: dict[str, int] = {}  # what the set_* functions were told; "vpp_size" and "vpp_rank" too
_ALONE = Group.single("tp")

NOT_INITIALIZED = (
    "no default grid exists: call core.parallel_state.initialize_model_parallel(...) first"
)


# ---- the default grid -------------------------------------------------------------------------


def set_default_grid(grid: ProcessGrid | None) -> None:
    """From now on `tp_group=None` and every question below mean `grid`."""
    global _grid
    _handles.clear()
    _overrides.clear()
    _grid = grid


def get_default_grid() -> ProcessGrid:
    if _grid is None:
        raise RuntimeError(NOT_INITIALIZED)
    return _grid


def resolve(group: object | None = None) -> Group:
    """The `Group` meant by a public argument: a Group, a torch ProcessGroup, or None (default tp).

    A ProcessGroup of the default grid is that grid's Group, so that its traffic is in the same
    ledger. None without a grid is fine in a process on its own, and an error in a world.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        if _grid is not None:
            return _grid.tp
        if not torch_groups.is_initialized() or torch_groups.world_group().size == 1:
            return _ALONE
        raise RuntimeError(
            "tp_group is None and no default grid exists: call "
            "core.parallel_state.initialize_model_parallel(...) or pass tp_group="
        )
    if not torch_groups.is_process_group(group):
        raise TypeError(
            f"a group must be a core.comm.Group, a torch ProcessGroup or None, not {type(group)}"
        )
    for known in _groups_of_grid():
        if known.handle is group:
            return known
    return Group.of(group)


def _groups_of_grid() -> tuple[Group, ...]:
    if _grid is None:
        return ()
    g = _grid
    return (g.tp, g.cp, g.dp, g.pp, g.dp_cp, g.tp_pp, g.tp_dp, g.embed, g.world)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: object | None = None,
    get_position_embedding_ranks: object | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
    sharp_enabled_group: str | None = None,
    create_all_gather_group: bool = False,
) -> None:
    """Arrange the ranks of torch's default group, with the arguments of Megatron's function.

    Collective: every rank calls it. In a process without torch.distributed it makes the grid of one
    rank. `distributed_timeout_minutes` and `create_gloo_process_groups` have no effect: groups keep
    the timeout of the default group, and are of its backend.

    Raises RuntimeError when the sizes do not fit the world or a grid exists already, and
    NotImplementedError, naming the argument, for what is not supported.
    """
    arguments = dict(locals())
    _refuse(arguments, _ONLY | {"expert_tensor_parallel_size": (None, tensor_model_parallel_size)})
    if _grid is not None:
        raise RuntimeError("a default grid exists already; call destroy_model_parallel() first")
    if virtual_pipeline_model_parallel_size is not None and pipeline_model_parallel_size == 1:
        raise RuntimeError(
            f"virtual_pipeline_model_parallel_size {virtual_pipeline_model_parallel_size} needs a "
            "pipeline_model_parallel_size of 2 or more, not 1"
        )
    world = torch_groups.world_group() if torch_groups.is_initialized() else Group.single("world")
    try:
        shape = RankGrid.fit(
            world.size,
            tp=tensor_model_parallel_size,
            cp=context_parallel_size,
            pp=pipeline_model_parallel_size,
            order=order,
        )
    except ValueError as error:
        hint = "" if torch_groups.is_initialized() else "; init_process_group() was not called"
        raise RuntimeError(f"{error}{hint}") from None
    device = torch_groups.communication_device()
    if world.size == 1:
        set_default_grid(ProcessGrid.single(device, world.ledger))
    else:
        set_default_grid(ProcessGrid.build(shape, world, device))
    if virtual_pipeline_model_parallel_size is not None:
        _overrides.update(vpp_size=virtual_pipeline_model_parallel_size, vpp_rank=0)


# Arguments of initialize_model_parallel that stand for what does not exist here: what they may be.
_ONLY: dict[str, tuple] = {
    "pipeline_model_parallel_comm_backend": (None,),
    "use_sharp": (False,),
    "hierarchical_context_parallel_sizes": (None,),
    "hybrid_context_parallel": (False,),
    "expert_model_parallel_size": (1,),
    "num_distributed_optimizer_instances": (1,),
    "nccl_communicator_config_path": (None,),
    "get_embedding_ranks": (None,),
    "get_position_embedding_ranks": (None,),
    "high_priority_stream_groups": (None, []),
    "sharp_enabled_group": (None,),
    "create_all_gather_group": (False, None),
}


def _refuse(given: dict[str, object], allowed: dict[str, tuple]) -> None:
    for name, values in allowed.items():
        if given[name] not in values:
            raise NotImplementedError(
                f"{name}={given[name]!r} is not supported; leave it at {values[0]!r}"
            )


def destroy_model_parallel() -> None:
    """Forget the default grid. torch.distributed's groups stay; its default group owns them."""
    set_default_grid(None)


def model_parallel_is_initialized() -> bool:
    return _grid is not None


def is_initialized() -> bool:
    """Megatron's older name of `model_parallel_is_initialized`."""
    return _grid is not None


def is_unitialized() -> bool:
    """Megatron's spelling."""
    return _grid is None


# ---- groups: real torch ProcessGroups, never None ------------------------------------------------
#
# To torch.distributed a group of None means the world, so an axis of size 1 gets a ProcessGroup of
# this rank alone, made when it is first asked for.


def _handle(name: str, check_initialized: bool = True) -> object | None:
    if _grid is None and not check_initialized:
        return None
    group: Group = getattr(get_default_grid(), name)
    return group.handle if group.size > 1 else _handle_of_one(name)


def _handle_of_one(name: str) -> object:
    if not torch_groups.is_initialized():
        raise RuntimeError(
            f"the {name} group has no torch ProcessGroup, as torch.distributed is not initialized: "
            "call torch.distributed.init_process_group(), or pass tp_group=None, which needs none"
        )
    if "one" not in _handles:
        _handles["one"] = torch_groups.group_of_one()
    return _handles["one"]


def process_group(group: Group) -> object:
    """The torch ProcessGroup of a Group; the Group itself where torch.distributed is not in use."""
    if group.handle is not None or not torch_groups.is_initialized():
        return group.handle or group
    return _handle_of_one(group.name)


def _without_cp(name: str, asked: str) -> str:
    """`name` stands for `asked` as long as nothing is cut along the context axis."""
    if get_default_grid().cp.size > 1:
        raise NotImplementedError(
            f"the {asked} group is not built with context_parallel_size "
            f"{get_default_grid().cp.size}; it is with 1"
        )
    return name


get_model_parallel_group = partial(_handle, "tp_pp")
get_tensor_model_parallel_group = partial(_handle, "tp")
get_pipeline_model_parallel_group = partial(_handle, "pp")
get_context_parallel_group = partial(_handle, "cp")
get_embedding_group = partial(_handle, "embed")  # first and last stage; alone on those between


def _no_partial(partial: bool) -> None:
    if partial:
        raise NotImplementedError(
            "partial data-parallel groups are not supported: there is one optimizer instance"
        )


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
):
    _no_partial(partial_data_parallel)
    return _handle("dp_cp" if with_context_parallel else "dp")


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
):
    """The data-parallel group where it is of gloo; no second group is made for another backend."""
    if torch_groups.communication_device().type != "cpu":
        raise NotImplementedError("gloo copies of the data-parallel groups are not created")
    return get_data_parallel_group(with_context_parallel, partial_data_parallel)


def get_position_embedding_group(check_initialized: bool = True):
    """Position tables live on the first stage only, so nobody shares one."""
    if _grid is None and not check_initialized:
        return None
    get_default_grid()
    return _handle_of_one("position embedding")


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
):
    if _grid is None and not check_initialized:
        return None
    asked = "tensor, data and context parallel"
    return _handle(_without_cp("tp_dp", asked) if with_context_parallel else "tp_dp")


def get_tensor_and_context_parallel_group(check_initialized: bool = True):
    if _grid is None and not check_initialized:
        return None
    return _handle(_without_cp("tp", "tensor and context parallel"))


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False):
    if tp_only_amax_red:
        return (
            get_tensor_and_context_parallel_group()
            if with_context_parallel
            else get_tensor_model_parallel_group()
        )
    return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)


# ---- sizes and ranks --------------------------------------------------------------------------
#
# The set_* functions exist for tools that pretend another layout in one process; None takes the
# pretence back.


def _group(name: str) -> Group:
    """As a public argument of None: without a grid, a process on its own is a group of one."""
    return resolve() if _grid is None else getattr(_grid, name)


def _size(name: str) -> int:
    return _overrides.get(f"{name}_size", None) or _group(name).size


def _rank(name: str) -> int:
    rank = _overrides.get(f"{name}_rank")
    return _group(name).rank if rank is None else rank


def _override(key: str, value: int | None) -> None:
    if value is None:
        _overrides.pop(key, None)
    else:
        _overrides[key] = value


get_tensor_model_parallel_world_size = partial(_size, "tp")
get_tensor_model_parallel_rank = partial(_rank, "tp")
set_tensor_model_parallel_world_size = partial(_override, "tp_size")
set_tensor_model_parallel_rank = partial(_override, "tp_rank")

get_pipeline_model_parallel_world_size = partial(_size, "pp")
get_pipeline_model_parallel_rank = partial(_rank, "pp")
set_pipeline_model_parallel_world_size = partial(_override, "pp_size")
set_pipeline_model_parallel_rank = partial(_override, "pp_rank")

# None where stages are not cut into chunks
get_virtual_pipeline_model_parallel_world_size = partial(_overrides.get, "vpp_size")
get_virtual_pipeline_model_parallel_rank = partial(_overrides.get, "vpp_rank")
set_virtual_pipeline_model_parallel_world_size = partial(_override, "vpp_size")
set_virtual_pipeline_model_parallel_rank = partial(_override, "vpp_rank")

get_context_parallel_world_size = partial(_size, "cp")
get_context_parallel_rank = partial(_rank, "cp")
set_data_parallel_rank = partial(_override, "dp_rank")


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    _no_partial(partial_data_parallel)
    return _size("dp_cp" if with_context_parallel else "dp")


def get_data_parallel_rank(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    _no_partial(partial_data_parallel)
    return _rank("dp_cp" if with_context_parallel else "dp")


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    return None if _grid is None and not check_initialized else list(get_default_grid().cp.ranks)


def get_tensor_and_context_parallel_world_size() -> int:
    return _size("tp") * _size("cp")


def get_tensor_and_context_parallel_rank() -> int:
    return _rank("tp") + _size("tp") * _rank("cp")


def get_all_ranks() -> str:
    """My ranks along tp, dp, cp, pp and ep, joined by underscores."""
    return "_".join(str(_rank(axis)) for axis in ("tp", "dp", "cp", "pp")) + "_0"


# ---- pipeline: first, last and neighbours --------------------------------------------------------


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of my group; likewise below."""
    return get_default_grid().tp.ranks[0]


def get_model_parallel_src_rank() -> int:
    return get_default_grid().tp_pp.ranks[0]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    grid = get_default_grid()
    return (grid.dp_cp if with_context_parallel else grid.dp).ranks[0]


def get_pipeline_model_parallel_first_rank() -> int:
    return get_default_grid().pp.ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    return get_default_grid().pp.ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank after mine in the pipeline; the first after the last."""
    pp = get_default_grid().pp
    return pp.ranks[(pp.rank + 1) % pp.size]


def get_pipeline_model_parallel_prev_rank() -> int:
    pp = get_default_grid().pp
    return pp.ranks[(pp.rank - 1) % pp.size]


def _is_virtual_stage(wanted: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    """Whether the chunk asked about is chunk `wanted` (-1: the last), when there are chunks."""
    chunks = get_virtual_pipeline_model_parallel_world_size()
    if ignore_virtual or chunks is None:
        return True
    chunk = get_virtual_pipeline_model_parallel_rank() if vp_stage is None else vp_stage
    return chunk == wanted % chunks


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    return _is_virtual_stage(0, ignore_virtual, vp_stage) and _rank("pp") == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    return _is_virtual_stage(-1, ignore_virtual, vp_stage) and _rank("pp") == _size("pp") - 1


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank (this chunk of it) holds a copy of the word embedding."""
    return is_pipeline_first_stage(ignore_virtual, vp_stage) or is_pipeline_last_stage(
        ignore_virtual, vp_stage
    )


def is_rank_in_position_embedding_group() -> bool:
    return _rank("pp") == 0


# ---- experts: every layer is dense, so the expert axes are those of the dense layers ------------

get_expert_model_parallel_group = get_position_embedding_group  # this rank alone
get_expert_tensor_parallel_group = get_tensor_model_parallel_group
get_expert_tensor_parallel_world_size = get_tensor_model_parallel_world_size
get_expert_tensor_parallel_rank = get_tensor_model_parallel_rank
get_expert_tensor_and_model_parallel_group = get_tensor_model_parallel_group
get_expert_tensor_and_model_parallel_world_size = get_tensor_model_parallel_world_size
get_expert_tensor_and_model_parallel_rank = get_tensor_model_parallel_rank
get_expert_tensor_model_pipeline_parallel_group = get_model_parallel_group


def get_expert_model_parallel_world_size() -> int:
    return 1


def get_expert_model_parallel_rank() -> int:
    return 0


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
):
    _no_partial(partial_expert_data_parallel)
    return _handle("dp_cp", check_initialized)


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    return get_data_parallel_world_size(True, partial_expert_data_parallel)


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    return get_data_parallel_rank(True, partial_expert_data_parallel)
